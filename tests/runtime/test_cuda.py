"""The same numbers on CUDA devices."""

import pytest
import torch
from toys import MODES, NOISY, TOYS, both, mean_loss, plain_step

from fxpipe.runtime import load
from fxpipe.runtime.drawing import drawing
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.stream import hardware

N_CUDA = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(N_CUDA == 0, reason="this machine has no CUDA device"),
]


def _lists(n):
    """One device twice, the CPU beside it, and all different where there are enough."""
    yield ["cuda:0"] * n
    yield ["cpu" if j % 2 else "cuda:0" for j in range(n)]
    if n <= N_CUDA:
        yield [f"cuda:{j}" for j in range(n)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in TOYS if TOYS[name] is not NOISY])
def test_the_same_numbers(tmp_path, name, mode):
    toy = TOYS[name]
    model, _ = both(tmp_path, toy, schedule="1f1b", checkpoint=mode)
    x = toy.inputs()
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    plain_step(toy, model, x, 4)
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    for devices in _lists(len(toy.parts)):
        pipe = load(tmp_path, devices)
        for run in ("step", "call"):
            pipe.load_state_dict(state)
            pipe.zero_grad()
            if run == "step":
                pipe.step(*x, loss_fn=lambda output, target: mean_loss(output).cuda())
            else:
                mean_loss(pipe(*x)).backward()
            for key, parameter in pipe.named_parameters():
                torch.testing.assert_close(
                    parameter.grad.cpu(), expected[key], rtol=1e-10, atol=1e-12
                )


def test_a_stream_draws_what_manual_seed_gives():
    device = torch.device("cuda", 0)
    torch.manual_seed(7)
    expected = torch.rand(5, device=device), torch.rand(5, device=device)
    before = torch.cuda.get_rng_state(device)
    with drawing(RandomStream(7), device) as first:
        one = torch.rand(5, device=device)
    with drawing(first.end, device):
        two = torch.rand(5, device=device)
    assert torch.equal(one, expected[0])
    assert torch.equal(two, expected[1])
    assert torch.equal(torch.cuda.get_rng_state(device), before)


def test_layers_draw_from_the_stream_and_elsewhere_from_torchs_generator():
    device = torch.device("cuda", 0)
    module = torch.nn.Sequential(torch.nn.Dropout(0.4), torch.nn.Tanh(), torch.nn.Dropout(0.4))
    x = torch.linspace(-1, 1, 32, device=device)
    torch.manual_seed(7)
    expected = module(x)
    end = torch.cuda.get_rng_state(device)
    before = torch.manual_seed(99) and torch.cuda.get_rng_state(device)
    for _ in range(3):
        with drawing(RandomStream(7), device, module) as mode:
            found = module(x)
        assert torch.equal(found, expected)
        assert torch.equal(mode.end.state(device), end)
        assert torch.equal(torch.cuda.get_rng_state(device), before)


@pytest.mark.parametrize("mode", MODES)
def test_recompute_draws_the_same_masks(tmp_path, mode):
    gradients = []
    for checkpoint in ("never", mode):
        both(tmp_path, NOISY, checkpoint=checkpoint)
        pipe = load(tmp_path, ["cuda:0"] * 3)
        torch.manual_seed(1)
        pipe.load_state_dict({k: torch.ones_like(v) / 7 for k, v in pipe.state_dict().items()})
        mean_loss(pipe(*NOISY.inputs())).backward()
        gradients.append([p.grad for p in pipe.parameters()])
    for never, other in zip(*gradients, strict=True):
        torch.testing.assert_close(never, other, rtol=1e-10, atol=1e-12)


def test_each_gpu_has_a_name_of_its_own():
    names = [hardware(torch.device("cuda", k)) for k in range(N_CUDA)]
    assert len(set(names)) == N_CUDA
    assert torch.cuda.get_device_name(0) in names[0]
    assert hardware(torch.device("cpu")) is None
