"""What a model does with its own tensors that a package could not do, told before it goes wrong.

A package has tensors of its own, and several micro-batches under way: a hook on a parameter, memory
that two tensors share, or a parameter that forward writes would be lost in silence.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxpipe.capture.names import attribute
from fxpipe.errors import CaptureError, InputError
from fxpipe.ir import Op, SourceLine, own_storage
from fxpipe.memory import storage_of
from fxpipe.runtime.weight_gradients import has_hooks
from fxpipe.runtime.weights.original import is_added


def refuse_lazy(model: nn.Module) -> None:
    """Raise InputError if a parameter or buffer has no shape yet."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise InputError(f"{name!r} has no shape yet: call the model once on its inputs before")


def refuse_hooks(model: nn.Module) -> None:
    """Raise CaptureError if a parameter has a hook, or a module one for its backward."""
    for name, parameter in model.named_parameters():
        if has_hooks(parameter):
            raise CaptureError(
                f"the parameter {name!r} has a hook, which a package can't hold: register it on "
                f"the pipeline's, pipe.get_parameter({name!r}), and leave it out of the model"
            )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"the module {path!r} has a hook for its backward, which a package can't hold: "
                "where it changes gradients write a custom autograd.Function, else leave it out"
            )


def refuse_writes(ops: Mapping[str, Op], state: Mapping[str, Tensor]) -> None:
    """Raise CaptureError if an op was seen to write a parameter."""
    parameters = {own_storage(k): k for k, t in state.items() if isinstance(t, nn.Parameter)}
    for op in ops.values():
        for name in filter(None, map(parameters.get, op.mutates)):
            raise CaptureError(
                f"forward writes the parameter {name!r}{_at(op.source)}: a pipeline has several "
                "micro-batches under way, whose backward needs it as it was. Write it between "
                "steps, outside of forward, or make it a buffer"
            )


def refuse_new_buffers(before: Iterable[str], model: nn.Module) -> None:
    """Raise CaptureError if the state_dict has tensors by names that it had not `before`."""
    tensors = [name for name, value in model.state_dict().items() if not is_added(name, value)]
    for name in [name for name in tensors if name not in set(before)]:
        raise CaptureError(
            f"forward registers {name!r}, which the model's state_dict lacks before the first "
            "call: register it in the constructor, with the shape that it will have"
        )


def refuse_written_inputs(part: nn.Module, inputs: Sequence[str], written: Sequence[bool]) -> None:
    """Raise CaptureError if a part of a program writes an input in place."""
    for name in [name for name, is_written in zip(inputs, written, strict=True) if is_written]:
        raise CaptureError(
            f"the forward of {type(part).__name__} writes its input {name!r} in place: what is "
            "around it may read that, but a pipeline writes a copy. Use an op that is not in-place"
        )


def refuse_shared_memory(
    model: nn.Module,
    read: Iterable[str],
    state: Mapping[str, Tensor],
    ops: Mapping[str, Op],
) -> None:
    """Raise CaptureError if a tensor that is `read` shares memory with one that changes.

    Parameters change in each step, buffers if an op writes them.
    """
    written = {storage for op in ops.values() for storage in op.mutates}
    for name in read:
        if name not in state:  # a flag
            continue
        tensor = state[name]
        if isinstance(tensor, nn.Parameter):
            continue
        sharing = [other for other in state if storage_of(state[other]) == storage_of(tensor)]
        changes = any(own_storage(other) in written for other in sharing)
        for other in sharing:
            if not changes and not isinstance(state[other], nn.Parameter):
                continue
            if _apart(model, name, other) and _overlap(tensor, state[other]):
                one, two = (_said(model, tensor) for tensor in (name, other))
                raise CaptureError(
                    f"{one!r} shares memory with {two!r}, which changes: in a package, as in a "
                    "model that is moved, each has its own. Keep one, and take the other of it in "
                    "forward"
                )


def _said(model: nn.Module, name: str) -> str:
    path, dot, _ = name.rpartition(".")
    return path + dot + attribute(model, name)[1]


def _apart(model: nn.Module, name: str, other: str) -> bool:
    """Whether two names are of two attributes, not of one of a module that has two names."""
    (module, leaf), (other_module, other_leaf) = attribute(model, name), attribute(model, other)
    return module is not other_module or leaf != other_leaf


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors on one storage may have an element in common."""
    (start, end), (other_start, other_end) = map(_extent, (a, b))
    return start < other_end and other_start < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from the first element to behind the last one."""
    start, steps = int(tensor.storage_offset()), zip(tensor.shape, tensor.stride(), strict=True)
    elements = sum((size - 1) * stride for size, stride in steps) + 1 if tensor.numel() else 0
    return start * tensor.itemsize, (start + elements) * tensor.itemsize


def _at(source: SourceLine | None) -> str:
    return f" at {source}" if source else ""
