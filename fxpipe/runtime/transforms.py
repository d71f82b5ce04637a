"""What torch has for each thread, as transforms and traces, which other lanes would not see."""

import torch
from torch.autograd import forward_ad

from fxpipe.errors import InputError


def refuse_transforms() -> None:
    """Raise InputError within a transform or a trace, which would lose what other lanes compute."""
    if _transforming():
        raise InputError(
            "transforms of torch.func (grad, vmap, jvp, ...) and forward-mode AD don't reach the "
            "threads that run the stages: take gradients by backward() or torch.autograd.grad, or "
            "transform the model itself"
        )
    if _tracing():
        raise InputError(
            "torch.jit.trace, torch.export and make_fx don't reach the threads that run the "
            "stages: trace the model itself, which takes the pipeline's state_dict()"
        )


def _tracing() -> bool:
    """Whether this thread's ops are taken down; by private names of torch 2.11 and 2.13."""
    key = torch._C._TorchDispatchModeKey.PROXY
    # Those of torch.export: whether it exports, torch.compiler tells all threads alike.
    before = torch._ops._get_dispatch_mode_pre_dispatch(key)  # type: ignore[no-untyped-call]
    proxies = torch._C._get_dispatch_mode(key) or before
    return torch._C._get_tracing_state() is not None or proxies is not None


def _transforming() -> bool:
    """Whether this thread is in one; by private names of torch 2.11 and 2.13."""
    stack = torch._C._functorch.peek_interpreter_stack()
    return stack is not None or forward_ad._current_level >= 0
