"""Compares a model that has a part of it spliced in as a pipeline with the plain model."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture.inputs import bind, input_names
from fxpipe.errors import InputError, TargetError
from fxpipe.loss import loss_of
from fxpipe.no_checkpoints import no_checkpoints
from fxpipe.precision import in_precision, set_precision
from fxpipe.runtime import Pipeline, Runner, splice
from fxpipe.runtime.random import microbatch_seeds
from fxpipe.runtime.runner import cut
from fxpipe.runtime.structure import describe, rebuild
from fxpipe.target import Inputs, Target
from fxpipe.verify_case import running_plain

Note = Callable[[str, dict[str, Any], dict[str, Any]], None]


def verify_part(
    pipe: Pipeline,
    target: Target,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    note: Note,
) -> None:
    """Run both on `rows` rows, micro-batch by micro-batch, then whole in evaluation; `note` each.

    What is not in the pipeline is on `device`. Both draw the same random numbers, and take the
    same branches. Raises InputError for inputs that can't be cut, and TargetError.
    """
    plain = set_precision(target.build(), dtype).to(device)
    spliced = splice(set_precision(target.build(), dtype).to(device), pipe)
    made = target.inputs(rows, plain)
    structure, tensors = describe(((made.args, made.kwargs), target.targets(rows)))
    batch = rebuild(structure, [in_precision(tensor, dtype).to(device) for tensor in tensors])
    m = pipe.manifest.microbatches
    runner = Runner(m)

    def train(model: nn.Module, piece: Any, share: float) -> list[Tensor]:
        (args, kwargs), wanted = copy.deepcopy(piece)
        output = model(*args, **kwargs)
        # The rest of the model may read what goes into the part.
        torch.autograd.backward(loss_of(target, output, wanted) * share, retain_graph=True)
        return [tensor.detach() for tensor in describe(output)[1]]

    for model in (plain, spliced):
        model.train()
    torch.manual_seed(seed)
    expected = []
    try:
        with running_plain(target, plain, dtype):
            for (piece, share), own in zip(cut(batch, m), microbatch_seeds(m), strict=True):
                torch.manual_seed(own)
                expected.append(train(plain, piece, share))
    except TargetError as error:
        whole = _given_whole(plain, made, rows)
        if not whole:
            raise
        with running_plain(target, plain, dtype):  # else it fails by itself
            train(plain, batch, 1.0)
        raise InputError(
            f"{type(plain).__name__} fails on a micro-batch, though not on the whole batch of "
            f"{rows}: verify cuts inputs of {rows} rows, and can't tell which rows of {whole} "
            "belong to a micro-batch. Give as many rows, as [batch, 2, ...] in place of "
            "[2 * batch, ...], to a wrapper whose forward flattens them. (In training, a Runner's "
            f"closure can choose them.)\n{error}"
        ) from error.__cause__
    torch.manual_seed(seed)
    what = f"forward of {type(plain).__name__}, or the loss,"
    with target.running(what), no_checkpoints():
        found = runner.step(lambda piece: train(spliced, piece, runner.share), batch)
    note("backward(): outputs", _named(found), _named(expected))
    gradients = [{name: p.grad for name, p in each.named_parameters()} for each in (spliced, plain)]
    note("backward(): gradients", *gradients)
    note("backward(): buffers", dict(spliced.named_buffers()), dict(plain.named_buffers()))
    if not pipe.manifest.has_eval:
        return
    outputs = []
    for model in (spliced, plain):
        (args, kwargs), _ = copy.deepcopy(batch)
        with torch.no_grad():
            outputs.append(_named([describe(model.eval()(*args, **kwargs))[1]]))
    note("eval(): outputs", *outputs)


def _given_whole(model: nn.Module, made: Inputs, rows: int) -> str:
    """The inputs that have other rows than the batch's, with how many."""
    structure, tensors = describe(bind(model, made.args, made.kwargs)[1])
    return ", ".join(
        f"{name!r} ({len(tensor)} rows)"
        for name, tensor in zip(input_names(structure), tensors, strict=True)
        if tensor.dim() and len(tensor) not in (1, rows)
    )


def _named(outputs: list[list[Tensor]]) -> dict[str, Tensor]:
    return {
        f"output {k} of micro-batch {i}": tensor
        for i, tensors in enumerate(outputs)
        for k, tensor in enumerate(tensors)
    }
