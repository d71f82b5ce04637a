"""What ranks are asked to do with a runner: each compares with the plain program in its process."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
import toys
from jobs import pair
from programs import Program, plain

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
