"""Random numbers that depend on the micro-batch alone, not on stages, schedule or recomputation.

Micro-batch i draws what the plain model would after `torch.manual_seed(seeds[i])`: its stream of
random numbers goes with it from stage to stage.
"""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

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


class Numbers:
    """A stream's numbers, which torch's own generators give while they stand in it.

    `end` is where they came to. With `compiles`, what draws them may compile, on any thread.
    """

    def __init__(self, start: RandomStream, compiles: bool = False) -> None:
        self.end = start
        self._compiles = compiles
        self._before: list[tuple[torch.device, torch.Generator, Tensor]] = []
        self._held = ExitStack()

    @property
    def taken(self) -> bool:
        """Whether the generators stand in the stream now."""
        return bool(self._before)

    def take(self, devices: Sequence[torch.device]) -> None:
        """Let the generators of `devices` go on from `end`; nobody else draws until `give_back`."""
        self._held.enter_context(LOCK)
        try:
            if not self._compiles:
                self._held.enter_context(_no_compiler())
            for device in devices:
                generator = stream.generator(device)
                self._before.append((device, generator, generator.get_state()))
                generator.set_state(self.end.state(device))
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Let the generators go on where they stood."""
        try:
            states = dict(self.end.states)
            states |= {device.type: g.get_state() for device, g, _ in self._before}
            self.end = RandomStream(self.end.seed, states)
            while self._before:
                _, generator, before = self._before.pop()
                generator.set_state(before)
        finally:
            self._held.close()


def _no_compiler() -> AbstractContextManager[Any]:
    """Let no other thread compile: torch then puts back the generators as they stood before.

    Private to torch: tests/test_private.py.
    """
    frames = sys.modules.get("torch._dynamo.convert_frame")  # there where something compiles
    return getattr(frames, "compile_lock", nullcontext())


_BORROWED: list[tuple[Numbers, Sequence[torch.device]]] = []  # at most one


@contextmanager
def borrowed(start: RandomStream) -> Iterator[Numbers]:
    """Let torch's own generators stand at `start` while the block runs and no stage draws."""
    devices = [torch.device("cpu")]
    if stream.cuda_in_use():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    numbers = Numbers(start, compiles=True)
    numbers.take(devices)
    _BORROWED.append((numbers, devices))
    try:
        yield numbers
    finally:
        _BORROWED.clear()
        numbers.give_back()


@contextmanager
def lent() -> Iterator[None]:
    """Within such a block, or another of these: let stages draw while this one waits for them."""
    held = [*_BORROWED]
    _BORROWED.clear()
    for numbers, _ in held:
        numbers.give_back()
    try:
        yield
    finally:
        for numbers, devices in held:
            numbers.take(devices)
        _BORROWED.extend(held)
