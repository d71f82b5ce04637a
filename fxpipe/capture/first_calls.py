"""What a call of the model in each mode shows before it is traced."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture.assigned import assigned, attribute_marks, changed
from fxpipe.capture.inputs import Form
from fxpipe.capture.names import all_tensors
from fxpipe.capture.places import user_place
from fxpipe.errors import CaptureError, InputError
from fxpipe.memory import is_fake
from fxpipe.ops.contents import Contents
from fxpipe.runtime.structure import Structure, describe, rebuild


@dataclass(frozen=True, slots=True)
class Seen:
    """`outputs` is their structure, in train and eval mode if they differ.

    `assigned` are the buffers that forward puts another tensor in place of, in train mode (True)
    and in eval mode (False); `written` says of each input whether forward writes it in place.
    `changing` are the attributes that a forward changes, `held` what was in them before, and `kept`
    what is afterwards.
    """

    outputs: Structure
    assigned: dict[bool, list[str]]
    written: tuple[bool, ...]
    changing: tuple[str, ...]
    held: Contents
    kept: Contents


def first_calls(
    model: nn.Module,
    form: Form,
    inputs: Structure,
    tensors: Sequence[Tensor],
    calls: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> Seen:
    """Call `model` in train mode, then in eval mode, on two copies of `tensors`.

    Raises InputError if it fails in train mode.
    """
    state, marks = dict(all_tensors(model)), attribute_marks(model)
    held = Contents(model, state)
    training, _ = describe(_call(model, form, rebuild(inputs, calls[0])))
    replaced = {True: assigned(model, state)}
    model.eval()
    try:
        with torch.no_grad():
            evaluation, _ = describe(form.call(model, rebuild(inputs, calls[1])))
    except Exception:  # a model that can't be evaluated on these inputs is pipelined for training
        evaluation = training
    replaced[False] = assigned(model, state)
    model.train()
    return Seen(
        outputs=training if evaluation == training else {"train": training, "eval": evaluation},
        assigned=replaced,
        written=tuple(
            any(_writes(tensor, copy) for copy in copies)
            for tensor, *copies in zip(tensors, *calls, strict=True)
        ),
        changing=tuple(changed(marks, attribute_marks(model))),
        held=held,
        kept=Contents(model, state),
    )


def refuse_resized(before: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise CaptureError for a buffer to which a call gave another size than `before`."""
    for name, was in before.items():
        now = state[name].shape
        if now != was.shape:
            raise CaptureError(
                f"a forward gives the buffer {name!r} another size, {list(now)} where it was "
                f"{list(was.shape)}: a pipeline's buffers keep theirs. If it is the first call "
                "that does, call the model once before you compile it"
            )


def _call(model: nn.Module, form: Form, given: dict[str, Any]) -> Any:
    try:
        return form.call(model, given)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__}.forward fails on these inputs {user_place(error)}\n"
            f"{type(error).__name__}: {error}"
        ) from error


def _writes(before: Tensor, after: Tensor) -> bool:
    """A write through `.data` counts no version."""
    return after._version > 0 or not (is_fake(after) or torch.equal(before, after))
