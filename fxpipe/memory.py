"""Models without memory: parameters that have a shape and no values, on torch's meta device.

Such a model is built, captured and priced without ever being allocated. It runs on fake tensors,
which know shapes, strides, dtypes and what shares memory, and compute nothing.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.errors import InputError
from fxpipe.precision import in_precision
from fxpipe.runtime.backward import differentiable

_LARGE_BYTES = 64 * 1024**2
_META = torch.device("meta")


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """Modules that are built inside get parameters without memory. Their buffers are real.

    The code inside is what it would be anyway: `LlamaForCausalLM(LlamaConfig())`. It may set
    initial values, which goes without effect, but not read a parameter's values.
    """
    made = WeakIdKeyDictionary()

    def strip(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Tensor | None:
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        if parameter not in made:  # registered again under another name, it is still the same one
            made[parameter] = nn.Parameter(parameter.detach().to(_META), parameter.requires_grad)
            made[parameter].__dict__.update(parameter.__dict__)
        return made[parameter]  # type: ignore[no-any-return]

    hook = register_module_parameter_registration_hook(strip)  # type: ignore[arg-type]
    try:
        with _LargeOnMeta():  # type: ignore[no-untyped-call]
            yield
    finally:
        hook.remove()


class _LargeOnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is made from nothing and is large is a parameter to be: it never gets memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        from_nothing = not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
        if from_nothing and any(argument.name == "device" for argument in func._schema.arguments):
            made = func(*args, **{**kwargs, "device": _META})
            if made.nbytes > _LARGE_BYTES:
                return made
        return func(*args, **kwargs)


def lacks_memory(model: nn.Module) -> bool:
    """Whether some parameter of `model` has none. Raises InputError if values are lost by that."""
    saved = model.state_dict(keep_vars=True)
    lost = [n for n, buffer in model.named_buffers() if buffer.is_meta and n not in saved]
    if lost:
        raise InputError(
            f"the buffer {lost[0]!r} has no values, and a state_dict does not hold it: in a model "
            "without memory a buffer must be computed from real tensors, and be under 64 MiB"
        )
    return any(parameter.is_meta for parameter in model.parameters())


@contextlib.contextmanager
def faked(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator["Faked"]:
    """Meanwhile all parameters, buffers and tensor attributes of `model` are fake ones.

    With `dtype`, in this precision.
    """
    fake = Faked()
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        places: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
        for held in places:
            for name, tensor in held.items():
                if isinstance(tensor, Tensor):
                    kept.append((held, name, tensor))
                    fake(tensor, None if held is vars(module) else dtype)
    for held, name, tensor in kept:
        held[name] = fake(tensor)
    try:
        yield fake
    finally:
        for held, name, tensor in kept:
            held[name] = tensor


def wants_numbers(
    error: BaseException | None,
) -> TypeGuard[DataDependentOutputException | DynamicOutputShapeException]:
    """Whether something failed on fake tensors because it looks at the numbers they don't have."""
    return isinstance(error, DataDependentOutputException | DynamicOutputShapeException)


class Faked:
    """Makes fake tensors, one for each tensor; those of a meta tensor are on the CPU.

    `mode` must be on where they are computed with.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made = WeakIdKeyDictionary()

    def __call__(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The fake tensor of `tensor`, in the precision of `dtype` where it is made, if given."""
        if tensor not in self._made:
            if tensor.is_meta:
                with self.mode:
                    made = torch.empty_strided(
                        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu"
                    ).requires_grad_(tensor.requires_grad)
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made.detach(), tensor.requires_grad)
            else:
                made = self.mode.from_tensor(tensor)
            if dtype is not None and differentiable(tensor):
                wider = in_precision(made.detach(), dtype)
                trained = tensor.requires_grad
                is_state = isinstance(tensor, nn.Parameter)
                made = nn.Parameter(wider, trained) if is_state else wider.requires_grad_(trained)
            self._made[tensor] = made
        return self._made[tensor]  # type: ignore[no-any-return]

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Fake tensors like these for one run, which may write into them."""
        with self.mode:
            made = [torch.empty_like(self(tensor)) for tensor in tensors]
        return [
            new.requires_grad_(old.requires_grad) for new, old in zip(made, tensors, strict=True)
        ]


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` has no values to be read."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def dense_tensors(tree: Any) -> list[Tensor]:
    """The tensors in `tree` that have memory; a sparse one has parts, which ops made before it."""
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [tensor for tensor in leaves if tensor.layout is torch.strided]


def storage_of(tensor: Tensor) -> int:
    """A number for the memory of `tensor`, real or fake, while it lives."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
