"""The same numbers on virtual devices."""

import importlib.util

import pytest
import torch
from toys import MODES, NOISY, SCHEDULES, TOYS, both, mean_loss, plain_step

from fxpipe.runtime import load

HAS_CUDA = torch.cuda.is_available()
HAS_BINDINGS = (
    importlib.util.find_spec("cuda") is not None
    and importlib.util.find_spec("cuda.bindings") is not None
)
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not HAS_CUDA, reason="this machine has no CUDA device"),
    pytest.mark.skipif(not HAS_BINDINGS, reason="cuda.bindings is not installed"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in TOYS if TOYS[name] is not NOISY])
def test_the_same_numbers(tmp_path, name, mode, schedule):
    toy = TOYS[name]
    model, _ = both(tmp_path, toy, schedule=schedule, checkpoint=mode)
    x = toy.inputs()
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    plain_step(toy, model, x, 4)
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    pipe = load(tmp_path, f"cuda:0/{len(toy.parts)}")
    given = [tensor.cuda() for tensor in x]
    for run in ("step", "call", "step"):
        pipe.load_state_dict(state)
        pipe.zero_grad()
        if run == "step":
            pipe.step(*given, loss_fn=mean_loss)
        else:
            mean_loss(pipe(*given)).backward()
        for key, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad.cpu(), expected[key], rtol=1e-10, atol=1e-12)


def test_a_lane_waits_for_what_the_caller_launched_and_the_caller_for_the_lanes(tmp_path):
    toy = TOYS["chain"]
    _, pipe = both(tmp_path, toy)
    virtual = load(tmp_path, f"cuda:0/{len(toy.parts)}")
    virtual.load_state_dict(pipe.state_dict())
    (x,) = toy.inputs()
    expected = mean_loss(pipe(x)).item()
    for _ in range(10):
        late = torch.zeros(len(x), 6, dtype=torch.float64, device="cuda")
        torch.cuda._sleep(10_000_000)
        late.copy_(x)
        loss = mean_loss(virtual(late))
        late.zero_()
        assert loss.item() == pytest.approx(expected)
