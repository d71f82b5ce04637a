"""Transforms of torch.func and forward-mode AD, which a lane on another thread would not see."""

import torch
from torch.autograd import forward_ad

from fxpipe.errors import InputError


def refuse_transforms() -> None:
    """Raise InputError within a transform, which would lose what other lanes compute."""
    if _transforming():
        raise InputError(
            "transforms of torch.func (grad, vmap, jvp, ...) and forward-mode AD don't reach the "
            "threads that run the stages: take gradients by backward() or torch.autograd.grad, or "
            "transform the model itself"
        )


def _transforming() -> bool:
    """Whether this thread is in one; by private names of torch 2.11 and 2.13."""
    stack = torch._C._functorch.peek_interpreter_stack()
    return stack is not None or forward_ad._current_level >= 0
