"""A step captured as a CUDA graph gives the plain model's numbers, each time it is replayed."""

import importlib.util
import warnings

import pytest
import torch
from toys import BATCH, CHAIN, MODES, NOISY, SCHEDULES, TOYS, both, mean_loss, plain_step

from fxpipe.runtime import load, whole_backward

HAS_BINDINGS = (
    importlib.util.find_spec("cuda") is not None
    and importlib.util.find_spec("cuda.bindings") is not None
)
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def on_one_gpu(virtual, n):
    if virtual and not HAS_BINDINGS:
        pytest.skip("cuda.bindings is not installed")
    return f"cuda:0/{n}" if virtual else ["cuda:0"] * n


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("virtual", [False, True], ids=["lanes", "virtual"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in TOYS if TOYS[name] is not NOISY])
def test_the_same_numbers(tmp_path, monkeypatch, name, mode, schedule, virtual, large):
    if large:  # products add to their weights' gradients
        monkeypatch.setattr(whole_backward, "_LARGE_BYTES", 1)
    toy = TOYS[name]
    model, _ = both(tmp_path, toy, schedule=schedule, checkpoint=mode)
    pipe = load(tmp_path, on_one_gpu(virtual, len(toy.parts)), capture="graph")
    pipe.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as where it could not be captured
        for batch in (BATCH, BATCH, 9, BATCH):
            x = toy.inputs(batch)
            plain_step(toy, model, x, 4)
            pipe.step(*(tensor.cuda() for tensor in x), loss_fn=mean_loss)
    for key, parameter in model.named_parameters():
        found = dict(pipe.named_parameters())[key].grad
        torch.testing.assert_close(found.cpu(), parameter.grad, rtol=1e-10, atol=1e-12)
    for key, buffer in model.named_buffers():
        found = dict(pipe.named_buffers())[key]
        torch.testing.assert_close(found.cpu(), buffer, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_it_learns_as_an_eager_one_does(tmp_path, autocast):
    model, _ = both(tmp_path, CHAIN)
    losses = []
    for capture in (None, "graph"):
        pipe = load(tmp_path, ["cuda:0"] * len(CHAIN.parts), capture=capture).float()
        pipe.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        x = CHAIN.inputs()[0].float().cuda()
        found = []
        for _ in range(5):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                found.append(pipe.step(x, loss_fn=lambda o, t: mean_loss(o.float())).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2 if autocast else 1e-5)
    assert losses[1][-1] != losses[1][0]


def test_a_loss_that_waits_for_its_value_cant_be_captured(tmp_path):
    model, _ = both(tmp_path, CHAIN)
    pipe = load(tmp_path, ["cuda:0"] * len(CHAIN.parts), capture="graph")
    pipe.load_state_dict(model.state_dict())

    def loss_fn(output, target):
        return mean_loss(output) * (2.0 if output.sum().item() > 1e9 else 1.0)

    x = CHAIN.inputs()
    with pytest.warns(UserWarning, match="runs eagerly: .*loss_fn failed on micro-batch 0"):
        pipe.step(x[0].cuda(), loss_fn=loss_fn)
    pipe.step(x[0].cuda(), loss_fn=loss_fn)
    for _ in range(2):
        plain_step(CHAIN, model, x, 4)
    for parameter, expected in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), expected.grad, rtol=1e-10, atol=1e-12)
    # The device is as usable as before.
    pipe.step(x[0].cuda(), loss_fn=mean_loss)
