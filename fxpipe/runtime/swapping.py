"""Other tensors in the place of a module's own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def swapped(module: nn.Module, kind: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put `tensors` in the place of the module's `_parameters` or `_buffers` of these names."""
    places = [(holder_of(module, name), name.rpartition(".")[2]) for name in tensors]
    before = [getattr(holder, kind)[leaf] for holder, leaf in places]
    for (holder, leaf), tensor in zip(places, tensors.values(), strict=True):
        getattr(holder, kind)[leaf] = tensor
    try:
        yield
    finally:
        for (holder, leaf), tensor in zip(places, before, strict=True):
            getattr(holder, kind)[leaf] = tensor


def parameter_of(module: nn.Module, name: str) -> Tensor:
    """The parameter `name`, or what stands in its place: no Parameter, if that is swapped in."""
    tensor = holder_of(module, name)._parameters[name.rpartition(".")[2]]
    assert tensor is not None
    return tensor


def holder_of(module: nn.Module, name: str) -> nn.Module:
    """The submodule that holds the parameter or buffer `name`."""
    for part in name.split(".")[:-1]:
        # Not `get_submodule`: a child may have the name of a method.
        child = module._modules[part]
        assert child is not None
        module = child
    return module
