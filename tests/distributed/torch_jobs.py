"""What ranks are asked to do with torch.distributed.pipelining, compared with the plain model."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
import toys
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import InputError

if TYPE_CHECKING:  # its import takes seconds, which not all ranks need
    from fxpipe.runtime.torch_pipelining.package import TorchPipelining


class Views(nn.Module):
    """A view crosses, is written in place, and its gradient is an expanded number; `b` is twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).unflatten(1, (2, 4)).transpose(1, 2)
        h.mul_(2.0)
        return self.b(torch.tanh(self.b(h))).flatten(1) + h.sum((1, 2)).unsqueeze(1)


VIEWS = toys.Toy(
    Views,
    (
        toys.Part(
            """
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)

            def forward(self, x):
                return self.a(x).unflatten(1, (2, 4)).transpose(1, 2)
            """,
            (None,),
            ("h",),
        ),
        toys.Part(
            """
            def __init__(self):
                super().__init__()
                self.b = nn.Linear(2, 2)

            def forward(self, h):
                h.mul_(2.0)
                return self.b(torch.tanh(self.b(h))), h
            """,
            (0,),
            ("c", "h_2"),
        ),
        toys.Part(
            """
            def forward(self, c, h_2):
                return c.flatten(1) + h_2.sum((1, 2)).unsqueeze(1)
            """,
            (1, 1),
            ("y",),
        ),
    ),
)


def pair(folder: Path, toy: toys.Toy, **settings: object) -> tuple[nn.Module, "TorchPipelining"]:
    """The plain model, and this rank's stages of it with the same weights."""
    parts = fxpipe.to_torch_pipelining(folder, "cpu", **settings)  # type: ignore[arg-type]
    torch.manual_seed(2)
    model = toy.model().double()
    parts.load_state_dict(model.state_dict())
    return model, parts


def ends(parts: "TorchPipelining") -> tuple[bool, bool]:
    """Whether the first stage is here, and the last."""
    return any(s.is_first for s in parts.stages), any(s.is_last for s in parts.stages)


def steps(folder: Path, toy: toys.Toy, batch: int, m: int) -> str:
    """Two steps, whose gradients add up; then an evaluation."""
    model, parts = pair(folder, toy, batch=batch)
    schedule = parts.schedule(toys.mean_loss)
    first, last = ends(parts)
    inputs = toy.inputs(batch)
    for _ in range(2):
        expected = toys.plain_step(toy, model, inputs, m)
        losses: list[Tensor] | None = [] if last else None
        target = torch.zeros(batch) if last else None
        schedule.step(*(inputs if first else ()), target=target, losses=losses)
        if losses is not None:
            assert toys.same(torch.stack(losses).mean(), expected)
        assert_same_state(parts, model)
    model.eval()
    parts.eval()
    with torch.no_grad():
        output = parts.schedule().step(*(inputs if first else ()))
        pieces = toys.microbatched_outputs(toy, model, inputs, m, random=False)
    if not last:
        assert output is None
        return "equal"
    found, parts_ = toys.describe(output), [toys.describe(piece) for piece in pieces]
    assert found[0] == parts_[0][0]
    for k, tensor in enumerate(found[1]):
        if tensor.dim() > 1:
            assert toys.same(tensor, torch.cat([part[1][k] for part in parts_]))
    return "equal"


def assert_same_state(parts: nn.Module, model: nn.Module) -> None:
    """Equal gradients and buffers; zeros may stand for a gradient that the model leaves None."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in parts.named_parameters():
        expected = gradients[name]
        if expected is None and parameter.grad is not None:
            expected = torch.zeros_like(parameter)
        assert toys.same(parameter.grad, expected), name
    buffers = dict(model.named_buffers())
    for name, buffer in parts.named_buffers():
        assert toys.same(buffer.double(), buffers[name].double()), name


def other_losses(folder: Path, m: int) -> str:
    """A loss of one output: weights of others get no gradient, or zeros."""
    toy = toys.EARLY
    model, parts = pair(folder, toy, batch=8)
    first, last = ends(parts)
    inputs = toy.inputs(8)
    for output in ("logits", "aux"):

        def loss_fn(found: dict[str, Tensor], _: object, output: str = output) -> Tensor:
            return found[output].pow(2).sum(1).mean()

        for each in (model, parts):
            each.zero_grad()
        loss_fn(model(*inputs), None).backward()
        schedule = parts.schedule(loss_fn)
        for target in (None, {"y": torch.zeros(8)}) if last else ():
            with pytest.raises(InputError, match="the rank of the last stage gives a tensor"):
                schedule.step(*(inputs if first else ()), target=target)
        target = torch.zeros(8) if last else None
        schedule.step(*(inputs if first else ()), target=target)
        assert_same_state(parts, model)
    return "equal"


def stages_alone(folder: Path, m: int) -> str:
    """A schedule of torch's own takes the stages, each under FSDP, as in torchtitan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    toy = toys.SKIPS
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    model, parts = pair(folder, toy, batch=8, group=mesh.get_group("pp"))
    first, last = ends(parts)
    stages = parts.stages
    for stage in stages:
        fully_shard(stage.submod, mesh=mesh["dp"])

    def loss_fn(returned: Tensor, target: Tensor) -> Tensor:
        return toys.mean_loss(parts.output(returned), target)

    schedule = ScheduleInterleaved1F1B(stages, m, loss_fn)
    inputs = toy.inputs(8)
    toys.plain_step(toy, model, inputs, m)
    schedule.step(*(inputs if first else ()), target=torch.zeros(8) if last else None)
    expected = dict(model.named_parameters())
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            assert toys.same(parameter.grad.full_tensor(), expected[name].grad), name
    return "equal"


def trained(folder: Path, members: Sequence[int]) -> str:
    """Steps of an optimizer on each rank of a group."""
    toy = toys.CHAIN
    group = torch.distributed.new_group(list(members))
    if torch.distributed.get_rank() not in members:
        return "elsewhere"
    model, parts = pair(folder, toy, group=group)
    first, last = ends(parts)
    schedule = parts.schedule(toys.mean_loss)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.05) for each in (model, parts)]
    inputs = toy.inputs()
    for _ in range(3):
        toys.plain_step(toy, model, inputs, 2)
        schedule.step(*(inputs if first else ()), target=torch.zeros(10) if last else None)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values = dict(model.named_parameters())
    assert all(toys.same(p, values[name]) for name, p in parts.named_parameters())
    return "equal"


def told(call: Callable[[], object]) -> str:
    """The error that a call gives, or the one that it was made of."""
    try:
        call()
    except Exception as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {cause}"
    return "nothing"


def saved(folder: Path) -> str:
    """The error of saving one rank's weights as if they were all."""
    _, parts = pair(folder, toys.CHAIN)
    return told(lambda: fxpipe.checkpoint.save(folder / "last", parts))


def refused(folder: Path, settings: dict[str, object]) -> str:
    """The error of taking the stages."""
    return told(lambda: fxpipe.to_torch_pipelining(folder, **settings))  # type: ignore[arg-type]


def refused_folder(folders: Sequence[Path]) -> str:
    """The error where each rank has a package of its own."""
    return refused(folders[torch.distributed.get_rank()], {})


def misused(folder: Path) -> list[str]:
    """The errors, on a rank with both ends, of calls that the stages weren't made for."""
    _, parts = pair(folder, toys.TIED, batch=8)
    if not all(ends(parts)):
        return []
    (first, last) = parts.stages
    (ids,) = toys.TIED.inputs(10)
    schedule = parts.schedule(toys.mean_loss)
    return [
        told(lambda: schedule.step(ids, target=ids)),
        told(lambda: schedule.step(ids[:8], ids[:8], target=ids)),
        told(lambda: first.submod(ids)),
        told(lambda: first.submod(ids=ids[:2])),
        told(lambda: last.scale_grads(4)),
    ]


def targets(folder: Path) -> list[str]:
    """The errors of steps and evaluations with no target, and with one of no tensor."""
    _, parts = pair(folder, toys.CHAIN, batch=8)
    schedule, found = parts.schedule(toys.mean_loss), []
    with mock.patch.object(type(schedule).__base__, "step"):  # which would wait for other ranks
        for target in (None, {"y": torch.zeros(8)}):
            found += [told(partial(run, target=target)) for run in (schedule.step, schedule.eval)]
    return found


def other_dtypes(folder: Path) -> list[str]:
    """What the first rank's stage says where floats between stages are none of those told of."""

    def said(dtype: torch.dtype | None) -> str:
        _, parts = pair(folder, toys.CHAIN, dtype=dtype)
        (x,) = toys.CHAIN.inputs(5)
        first = parts.float().stages[0].submod
        return told(lambda: first(x.float())) if ends(parts)[0] else ""

    return [said(None), said(torch.float32)]


def thawed(folder: Path) -> str:
    """What a stage says of a gradient that was none when it was compiled."""
    _, parts = pair(folder, toys.CHAIN)
    (x,) = toys.CHAIN.inputs(5)
    return told(lambda: parts.stages[0].submod(x)) if ends(parts)[0] else ""
