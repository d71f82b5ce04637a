"""Random numbers that depend on the micro-batch alone, not on stages, schedule or recomputation.

Micro-batch i draws what the plain model would after `torch.manual_seed(seeds[i])`: its stream of
random numbers goes with it from stage to stage. Torch's CPU generator is one for the process while
several lanes run at once, so each random op of a stage puts its micro-batch's state in for as long
as it takes.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.runtime import stream

_LOCK = threading.Lock()


def microbatch_seeds(m: int) -> list[int]:
    """The seeds of m micro-batches, drawn from torch's CPU generator."""
    seeds: list[int] = torch.randint(2**62, (m,), device="cpu").tolist()
    return seeds


@dataclass(frozen=True, slots=True)
class RandomStream:
    """Where a micro-batch stands in its random numbers: generator states by kind of device."""

    seed: int
    states: Mapping[str, Tensor] = field(default_factory=dict)

    def state(self, device: torch.device) -> Tensor:
        """The state for a generator of `device`; what `torch.manual_seed` gives, at first."""
        if device.type in self.states:
            return self.states[device.type]
        return torch.Generator(device).manual_seed(self.seed).get_state()


@contextmanager
def drawing(start: RandomStream, device: torch.device) -> Iterator["Drawing"]:
    """Let the block's random ops draw from `start`; the mode's `end` is where they came to."""
    mode = Drawing(start, device)
    with mode:
        yield mode


@contextmanager
def borrowed(start: RandomStream) -> Iterator["Borrowed"]:
    """Let torch's own generators stand at `start` while the block runs and no stage draws.

    Afterwards they stand where they stood, and the yielded object's `end` is where they came to.
    """
    devices = [torch.device("cpu")]
    if stream.cuda_in_use():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    generators = [stream.generator(device) for device in devices]
    borrowed = Borrowed(start)
    with _LOCK:
        before = [generator.get_state() for generator in generators]
        for generator, device in zip(generators, devices, strict=True):
            generator.set_state(start.state(device))
        try:
            yield borrowed
        finally:
            states = {
                device.type: generator.get_state()
                for generator, device in zip(generators, devices, strict=True)
            }
            borrowed.end = replace(start, states=states)
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


class Borrowed:
    """Where the generators came to, once given back."""

    def __init__(self, start: RandomStream) -> None:
        self.end = start


class Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Swaps the generators' states around each random op."""

    def __init__(self, start: RandomStream, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.end = start
        # An op of a CUDA stage may draw on the CPU too, as `torch.randn(...).to(device)` does.
        cpu = torch.device("cpu")
        self._devices: Sequence[torch.device] = [cpu] if device == cpu else [cpu, device]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        return self._draw(lambda: func(*args, **(kwargs or {})))

    def _draw(self, op: Callable[[], Any]) -> Any:
        generators = [stream.generator(device) for device in self._devices]
        with _LOCK:
            before = [generator.get_state() for generator in generators]
            for generator, device in zip(generators, self._devices, strict=True):
                generator.set_state(self.end.state(device))
            try:
                return op()
            finally:
                states = {
                    device.type: generator.get_state()
                    for generator, device in zip(generators, self._devices, strict=True)
                }
                self.end = replace(self.end, states=states)
                for generator, state in zip(generators, before, strict=True):
                    generator.set_state(state)
