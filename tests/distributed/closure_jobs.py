"""What ranks are asked to do with a runner: each compares with the plain program in its process."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import toys
from jobs import fail_at, pair
from programs import Program, plain
from torch import Tensor

from fxpipe.runtime import Runner


def steps(folder: Path, name: str, m: int, batches: Sequence[int], frozen: str) -> str:
    """Steps of several batch sizes, whose gradients add up; gives a digest of those around."""
    toy = toys.TOYS[name]
    model, pipe = pair(folder, toy)
    expected, program = Program(model, toy, frozen), Program(pipe, toy, frozen)
    runner = Runner(m)
    for batch in batches:
        inputs = toy.inputs(batch)
        torch.manual_seed(5)
        losses = plain(expected, toy, inputs, min(m, batch))
        torch.manual_seed(5)
        found = runner.step(lambda *piece: program(*piece, share=runner.share), *inputs)
        assert all(toys.same(a, b) for a, b in zip(found, losses, strict=True)), (found, losses)
        toys.assert_same_state(pipe, model)
        toys.assert_same_state(program, expected)
    gradients = [p.grad.numpy().tobytes() for p in program.parameters() if p.grad is not None]
    assert gradients
    return hashlib.sha256(b"".join(gradients)).hexdigest()


def failing(folder: Path, where: str, rank: int) -> tuple[str, str]:
    """The errors of a step in which something fails on `rank`, and of the next one."""
    _, pipe = pair(folder, toys.CHAIN)
    (x,) = toys.CHAIN.inputs()
    here, begun = pipe._ranks.rank == rank, []

    def closure(piece: Tensor) -> None:
        i = len(begun)
        begun.append(None)
        if here and where == f"before {i}":
            raise KeyError("mine")
        y = pipe(piece[:, :5] if here and where == f"call {i}" else piece)
        if here and where == f"after {i}":
            raise KeyError("mine")
        y.mean().backward()

    if where == "stage" and here:
        pipe._stages[-1].module.register_forward_pre_hook(fail_at(2))
    return tuple(error_of(lambda: Runner(4).step(closure, x)) for _ in range(2))


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"
