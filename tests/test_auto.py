"""Compiling with everything left to the search: what comes out runs, and equals the plain model."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxpipe
from fxpipe.errors import InputError, PlanError


class Block(nn.Module):
    """A residual block, so that a part of a stage is worth computing again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what two layers make of x."""
        return x + self.second(functional.gelu(self.first(x)))


class Model(nn.Module):
    """Six blocks and a skip from the first to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks, then the first one's result once more."""
        skip = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return x + skip


GIVEN = (torch.randn(8, 16, 8),)


def compiled(model: nn.Module, **options: object) -> fxpipe.Package:
    settings = {"devices": "cpu*2", "microbatches": 4, "profile": "analytic:cpu"}
    return fxpipe.compile(model, GIVEN, **{"time_limit_s": 0.3, **settings, **options})


@pytest.mark.parametrize(("checkpoint", "memory"), [("never", "1GiB"), ("auto", "60KiB")])
@pytest.mark.parametrize("schedule", ["auto", "cpsat"])
def test_what_the_search_planned_trains_as_the_plain_model_does(
    tmp_path, schedule: str, checkpoint: str, memory: str
) -> None:
    torch.manual_seed(0)
    model = Model()
    # In less time, a named schedule of whole stages computed again may be shorter.
    package = compiled(
        model, schedule=schedule, checkpoint=checkpoint, memory=memory, time_limit_s=2.0
    )
    package.write(tmp_path / "out")
    assert package.manifest.solver == {"auto": "search", "cpsat": "cpsat"}[schedule]
    assert package.manifest.gap is not None
    assert max(package.manifest.estimate.peak_bytes) <= int(memory[:-3]) * 1024 ** (
        3 if memory.endswith("GiB") else 1
    )

    plain = copy.deepcopy(model).double()
    pipe = fxpipe.load(tmp_path / "out").double()
    pipe.load_state_dict(plain.state_dict())
    x, target = torch.randn(7, 16, 8).double(), torch.randn(7, 16, 8).double()
    expected = functional.mse_loss(plain(x), target)
    expected.backward()

    loss = pipe.step(x, target=target, loss_fn=functional.mse_loss)

    torch.testing.assert_close(torch.as_tensor(loss).double(), expected.detach())
    gradients = dict(pipe.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad)


def test_little_memory_makes_stages_compute_parts_again() -> None:
    roomy = compiled(Model(), schedule="1f1b", checkpoint="auto", memory="1GiB")
    memory = f"{max(roomy.manifest.estimate.peak_bytes) * 7 // 10}B"
    tight = compiled(Model(), schedule="1f1b", checkpoint="auto", memory=memory)

    assert not any(roomy.plan.segments)
    assert any(tight.plan.segments)
    assert any("checkpoint(" in text for text in tight.files.values())
    assert tight.plan.schedule == roomy.plan.schedule
    assert tight.manifest.schedule == "1f1b"


def test_the_number_of_microbatches_is_chosen_too() -> None:
    package = compiled(Model(), microbatches="auto", schedule="1f1b")

    steps = {
        m: compiled(Model(), microbatches=m, schedule="1f1b").plan.estimate.step_ms
        for m in (2, 4, 8)
    }
    assert package.manifest.microbatches == min(steps, key=steps.__getitem__)
    assert {one.microbatches for one in package.manifest.candidates} == {2, 4, 8}


def test_what_does_not_go_together_is_told() -> None:
    with pytest.raises(
        InputError, match="auto recomputes nothing or chooses what: give checkpoint"
    ):
        compiled(Model(), schedule="auto", checkpoint="always")
    with pytest.raises(InputError, match="with microbatches auto each number of them is measured"):
        compiled(Model(), microbatches="auto", profile=compiled(Model()).profile)
    with pytest.raises(PlanError, match="no plan fits: in the nearest one found, device"):
        compiled(Model(), schedule="auto", memory="20KiB")
