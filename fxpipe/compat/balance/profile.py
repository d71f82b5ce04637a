"""What each layer of a Sequential takes, measured one by one on copies."""

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.runtime import stream


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """A copy of each layer, on the device and in training; the layers stay as they are."""
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


def profile_times(
    module: nn.Sequential,
    sample: Tensor | tuple[Tensor, ...],
    timeout: float,
    device: torch.device,
) -> list[int]:
    """Microseconds of each layer's forward and backward, of all repetitions together."""
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("some parameter already has gradient")
    times = [0.0 for _ in module]
    end = time.perf_counter() + timeout
    while time.perf_counter() < end:
        value: Any = sample
        for k, layer in enumerate(layerwise_sandbox(module, device)):
            value = _leaves(value, device)
            stream.synchronize(device)
            start = time.perf_counter()
            value = layer(value)
            roots = [tensor for tensor in _tensors(value) if tensor.requires_grad]
            if roots:
                torch.autograd.backward(roots, roots)
            stream.synchronize(device)
            times[k] += time.perf_counter() - start
    return [int(1e6 * seconds) for seconds in times]


def profile_sizes(
    module: nn.Sequential,
    input: Tensor | tuple[Tensor, ...],
    chunks: int,
    param_scale: float,
    device: torch.device,
) -> list[int]:
    """Bytes of each layer: those that a forward of one row leaves, scaled, and its parameters'."""
    if device.type != "cuda":
        raise ValueError("size profiler supports only CUDA device")
    rows = _tensors(input)[0].size(0) / chunks
    value: Any = input[:1] if isinstance(input, Tensor) else tuple(item[:1] for item in input)
    sizes = []
    for layer in layerwise_sandbox(module, device):
        value = _leaves(value, device)
        layer(_clones(value))  # libraries keep a workspace from their first call on
        before = torch.cuda.memory_allocated(device)
        value = layer(value)
        latent = torch.cuda.memory_allocated(device) - before
        parameters = sum(p.untyped_storage().nbytes() for p in layer.parameters())
        sizes.append(int(latent * rows + parameters * param_scale))
    return sizes


def _tensors(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


def _clones(value: Tensor | tuple[Tensor, ...]) -> Any:
    return value.clone() if isinstance(value, Tensor) else tuple(t.clone() for t in value)


def _leaves(value: Tensor | tuple[Tensor, ...], device: torch.device) -> Any:
    """The same on the device, beginning a graph."""
    leaves = tuple(t.detach().to(device).requires_grad_(t.requires_grad) for t in _tensors(value))
    return leaves[0] if isinstance(value, Tensor) else leaves
