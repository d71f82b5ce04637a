"""Random numbers that depend on the micro-batch alone, not on stages, schedule or recomputation.

Micro-batch i draws what the plain model would after `torch.manual_seed(seeds[i])`: its stream of
random numbers goes with it from stage to stage.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fxpipe.runtime import stream

LOCK = threading.Lock()  # torch's own generators are one for the process


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
def borrowed(start: RandomStream) -> Iterator["Borrowed"]:
    """Let torch's own generators stand at `start` while the block runs and no stage draws.

    Afterwards they stand where they stood, and the yielded object's `end` is where they came to.
    """
    devices = [torch.device("cpu")]
    if stream.cuda_in_use():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    generators = [stream.generator(device) for device in devices]
    borrowed = Borrowed(start)
    with LOCK:
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
