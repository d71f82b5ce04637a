"""A clock that works out what a run takes on another device, from operations and bytes.

Each call that reaches torch's ops is one kernel: it takes the longer of its arithmetic and of its
reads and writes, plus a launch (Williams et al., *Roofline*, CACM 2009).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fxpipe.costs.devices import Device
from fxpipe.memory import dense_tensors, storage_of

# The share of the peak that is reached. 16 transformer blocks (hidden size 2048, bfloat16) on 32
# of an H200's 132 multiprocessors trained at 0.70 of what the data sheet gives them.
_ARITHMETIC = 0.7
_MEMORY = 0.8

aten = torch.ops.aten
# CPU's own kernels of attention take what the others do.
_LIKE = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
# These read of their first tensor only as much as they return.
_PICK = {aten.embedding, aten.index, aten.index_select, aten.gather}
_MAKE_NOTHING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}


class Roofline:
    """A clock for `Meter`; it runs everything once, on fake tensors as well as on real ones."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __call__(self, run: Callable[[Any], object], given: Callable[[], Any]) -> float:
        """Milliseconds that `device` would take."""
        values = given()
        kernels = _Kernels(self._device)
        with kernels:
            run(values)
        return kernels.ms


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what each call costs."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ms = 0.0
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = _LIKE.get(func.overloadpacket, func.overloadpacket)
        if not (func.is_view or func.namespace == "prim" or packet in _MAKE_NOTHING):
            self.ms += self._kernel_ms(packet, args, kwargs, result)
        return result

    def _kernel_ms(self, packet: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> float:
        given, made = dense_tensors((args, kwargs)), dense_tensors(result)
        known = {storage_of(tensor) for tensor in given}
        written = [tensor for tensor in made if storage_of(tensor) not in known]
        if not made or (not written and packet is aten._unsafe_view):
            return 0.0
        n_bytes = sum(map(_bytes, [*given, *made]))
        if packet in _PICK:
            n_bytes += sum(map(_bytes, made)) - _bytes(given[0])
        operations = _operations(packet, args, kwargs, result)
        dtype = given[0].dtype if given else made[0].dtype
        arithmetic_ms = operations / (_ARITHMETIC * self._device.operations_per_ms(dtype))
        memory_ms = n_bytes / (_MEMORY * self._device.bytes_per_ms)
        return self._device.launch_ms + max(arithmetic_ms, memory_ms)


def _operations(packet: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> int:
    if packet is aten._grouped_mm:  # each row meets the matrix of its group
        return int(2 * args[0].numel() * args[1].shape[-1])
    count = flop_registry.get(packet)
    return int(count(*args, **kwargs, out_val=result)) if count else 0


def _bytes(tensor: Tensor) -> int:
    """What reading it all touches: an expanded tensor is no larger than its memory."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
