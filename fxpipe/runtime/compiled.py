"""What torch.compile makes of a stage's backward: it runs once, over what the forward has saved."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fxpipe.errors import StageError


def refuse_further_backwards(stage: int, outputs: Sequence[Tensor]) -> None:
    """Let a backward of a compiled stage's outputs raise StageError if another is to follow it.

    Its kernels may write to memory of saved tensors ("donated buffers"), and torch refuses it then,
    naming no stage. Not to have that is a setting of each thread, the lanes' as they compile and
    the caller's as it runs backward, so there is none to make here.
    """
    for output in outputs:
        if output.requires_grad:
            output.register_hook(partial(_refuse, stage))  # type: ignore[no-untyped-call]


def _refuse(stage: int, _: Tensor) -> None:
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        return
    what, asked = "a second backward", "retain_graph=True"
    if torch.is_grad_enabled():
        what, asked = "gradients of gradients", "create_graph=True"
    raise StageError(
        f"{what} ({asked}) can't come through stage {stage}, whose backward is of torch.compile: "
        "load without compile=True"
    )
