"""PyTorch 1.12's `torch.distributed.pipeline.sync.Pipe`, without RPC."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compat.microbatch import scatter
from fxpipe.compat.partitioned import Partitioned, verify_module
from fxpipe.compat.skip import verify_skippables
from fxpipe.runtime.batchnorm import DeferredBatchNorm


class WithDevice(nn.Module):
    """A layer of a `Pipe` and the device it is to be on, for one that has no parameters to tell."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._module = module
        self._device = torch.device(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        return self._module(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The layer."""
        return self._module

    @property
    def device(self) -> torch.device:
        """Its device."""
        return self._device


class LocalValue:
    """What a `Pipe` returns: a value that stands where an RRef of this process stood."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def local_value(self) -> Any:
        """The value."""
        return self._value

    def to_here(self, timeout: float = -1.0) -> Any:
        """The value."""
        return self._value

    def is_owner(self) -> bool:
        """True: it is this process's."""
        return True

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """The value's backward; distributed autograd has no part in it."""
        self._value.backward(retain_graph=retain_graph)


class PipeSequential(nn.Sequential):
    """A Sequential whose layers get a tuple's items as arguments."""

    def forward(self, *inputs: Any) -> Any:
        """The last layer's output."""
        value: Any = inputs
        for layer in self:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        return value


class Pipe(Partitioned):
    """An `nn.Sequential` in partitions: consecutive layers that the user put on one device.

    Each layer that is on the CPU is a partition of its own. Inputs are positional: tensors are cut
    along dimension 0, unless wrapped in `NoChunk`; all else goes whole to each micro-batch.
    Arguments are those of PyTorch 1.12; RPC need not be initialized.

    Raises TypeError for what is no Sequential or has skips that do not match, ValueError for wrong
    arguments, or a layer with parameters on several devices.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__(chunks, checkpoint)
        verify_module(module)
        verify_skippables(module)
        cut = list(_cut(module))
        _verify_splitting(cut)
        parts = [part for part, _ in cut]
        if deferred_batch_norm:
            convert = DeferredBatchNorm.convert_deferred_batch_norm
            parts = [convert(part, self.chunks) for part in parts]
        self._place(parts, [device for _, device in cut])

    def forward(self, *inputs: Any) -> LocalValue:
        """The output for a mini-batch, as `.local_value()`: a tensor, or a tuple.

        In a tuple, what is no tensor is a list with an item for each micro-batch. Raises TypeError
        without a tensor among the inputs, ValueError for one that is not on the first device.
        """
        first = self.devices[0] if self.devices else torch.device("cpu")
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        if not tensors:
            raise TypeError(f"inputs do not have any tensors: {inputs}")
        if any(tensor.device != first for tensor in tensors):
            raise ValueError("All inputs should be on the same device as the first partition")
        if not self.devices:
            return LocalValue(*inputs)
        pieces = scatter(inputs, self.chunks)
        return LocalValue(self._run(pieces, _call))


def _call(partition: nn.Module, value: Any) -> Any:
    output = partition(*value) if isinstance(value, tuple) else partition(value)
    if isinstance(output, list):
        output = tuple(output)
    if not isinstance(output, Tensor | tuple):
        raise TypeError(f"expected a Tensor or a tuple with one, but got {type(output).__name__}")
    if isinstance(output, tuple) and not any(isinstance(item, Tensor) for item in output):
        raise TypeError(f"No tensors found in batch: {output}")
    return output


def _cut(module: nn.Sequential) -> Iterator[tuple[nn.Sequential, torch.device]]:
    """The partitions and their devices; nested Sequentials are taken apart."""
    part, device = PipeSequential(), None
    for layer in module:
        at = _device_of(layer)
        if isinstance(layer, WithDevice):
            layer = layer.module.to(at)
        if device is not None and (at != device or at.type == "cpu"):
            yield part, device
            part = PipeSequential()
        device = at
        part.extend(layer if isinstance(layer, nn.Sequential) else [layer])
    if device is not None:
        yield part, device


def _device_of(layer: nn.Module) -> torch.device:
    if isinstance(layer, WithDevice):
        return layer.device
    found = {parameter.device for parameter in layer.parameters()}
    if len(found) > 1:
        raise ValueError(
            f"nn.Module: {layer}, should have all parameters on a single device, please use .to() "
            "to place the module on a single device"
        )
    return found.pop() if found else torch.device("cpu")


def _verify_splitting(cut: list[tuple[nn.Sequential, torch.device]]) -> None:
    homes: dict[nn.Parameter, torch.device] = {}
    for part, device in cut:
        for parameter in part.parameters():
            if homes.setdefault(parameter, device) != device:
                raise ValueError(
                    "module with duplicate parameters on distinct devices is not supported"
                )
