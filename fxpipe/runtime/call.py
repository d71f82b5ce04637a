"""What the lanes share during one call: where values, gradients and random numbers go."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor

from fxpipe.runtime import stream
from fxpipe.runtime.copy import Links, compact
from fxpipe.runtime.gate import Gate
from fxpipe.runtime.mailbox import Mailbox, Mirror, Outbox
from fxpipe.runtime.memory import Memory
from fxpipe.runtime.portal import CALLER, Wire, Wires, add_gradients, source_of
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.recorder import Recorder
from fxpipe.runtime.stage import Stage
from fxpipe.schedule import Action

Key = tuple[str, Wire | None, int, int]
Box = Mailbox[Key] | Outbox[Key] | Mirror[Key]

_UNSEEN = nullcontext()


class Call:
    """One call of the pipeline on `m` micro-batches: its stages and the wires between them.

    Stage `n` stands for the pipeline's end, which is on the last stage's device. What goes to one
    of the stages `elsewhere`, in other processes, is put into the outbox. By stage, `takes` are the
    wires of its arguments, `makes` those of what it returns.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        wires: Wires,
        links: Links,
        n_lanes: int,
        m: int,
        elsewhere: Collection[int] = (),
    ) -> None:
        self.stages = stages
        self.wires = wires
        self.n = len(stages)
        self.m = m
        self._links = links
        self._recorder: Recorder | None = None
        self._gate = Gate({}, n_lanes)
        self._lanes: list[Mailbox[Key]] = [Mailbox() for _ in range(n_lanes)]
        ends: list[Mailbox[Key]] = [Mailbox(), Mailbox()]
        # By stage: the pipeline's end has index n, the caller -1, which is the list's last.
        self._mailboxes: list[Box] = [*(self._lanes[stage.lane] for stage in stages), *ends]
        self.outbox: Outbox[Key] = Outbox()
        for j in elsewhere:
            self._mailboxes[j] = self.outbox
        self._homes: dict[tuple[str, int], torch.device] = {}
        self._random_stages = [stage.index for stage in stages if stage.spec.random]
        # What each action would ask for again.
        self.takes = [
            [Wire(source_of(port.source), port.value) for port in stage.inputs] for stage in stages
        ]
        self.makes = [
            [Wire(stage.index, output.value) for output in stage.outputs] for stage in stages
        ]
        by_stage = [*stages, stages[-1]]
        self._stage_lanes = [stage.lane for stage in by_stage]
        self._stage_devices = [stage.device for stage in by_stage]

    @property
    def draws(self) -> bool:
        """Whether any stage draws random numbers."""
        return bool(self._random_stages)

    def enter(self, i: int, piece: Mapping[str, Tensor], random: RandomStream | None) -> None:
        """Give micro-batch i's inputs, by value, to all that read them, and its random numbers."""
        for value, tensor in piece.items():
            wire = Wire(CALLER, value)
            self._homes[value, i] = tensor.device
            for j in self.wires.readers.get(wire, ()):
                self._mailboxes[j].put(("value", wire, j, i), (tensor, tensor.requires_grad))
        self.pass_random(CALLER, i, random)

    def lane(self, j: int) -> int:
        """The lane of stage j."""
        return self._stage_lanes[j]

    def device(self, j: int) -> torch.device:
        """The device of stage j."""
        return self._stage_devices[j]

    def record(self, recorder: Recorder) -> None:
        """Let `recorder` have what the lanes do."""
        self._recorder = self._links.recorder = recorder

    def count(self, memory: Memory) -> None:
        """Let `memory` have what the lanes send each other."""
        self._links.memory = memory

    def hold_back(self, gate: Gate) -> None:
        """Let what the lanes send each other wait at the `gate`."""
        self._gate = gate

    def ended(self, lane: int) -> None:
        """The lane has ended an action of its row."""
        self._gate.passed(lane)

    def span(self, j: int, name: str | Action, kind: str) -> AbstractContextManager[None]:
        """The block is what stage j's lane does as `name`."""
        if self._recorder is None:
            return _UNSEEN
        return self._recorder.span(self.lane(j), str(name), kind)

    @contextmanager
    def beside(self, j: int, name: str) -> Iterator[None]:
        """The block, on another thread, is what goes on as `name` beside stage j's lane."""
        with ExitStack() as stack:
            if self._recorder is not None:
                on = stream.current_stream(self.device(j))
                stack.enter_context(self._recorder.copying(self.lane(j), name, on))
            if self._links.memory is not None:
                stack.enter_context(self._links.memory.beside(self.lane(j)))
            yield

    def resized(self, j: int, tensors: Iterable[Tensor]) -> None:
        """Stage j's lane has got room for `tensors`, or let go of some."""
        if self._links.memory is not None:
            self._links.memory.resized(self.lane(j), tensors)

    def check(self, lane: int) -> None:
        """Raise StoppedError if the lane shall not begin anything more."""
        self._lanes[lane].check()

    def stop(self) -> None:
        """Make every lane end at its next wait or action."""
        for mailbox in {*self._lanes, *self._mailboxes}:
            mailbox.stop()
        self._gate.stop()

    def deliver(self, key: Key, item: object) -> None:
        """Put in what came from another process."""
        what, wire, j, _ = key
        at = wire.source if what == "gradient" and wire is not None else j
        self._mailboxes[at].put(key, item)

    def send_value(self, wire: Wire, i: int, tensor: Tensor, gradient: bool) -> None:
        """Send micro-batch i's value to each stage that reads it, saying if it has a gradient."""
        for j in self.wires.readers[wire]:
            source, target = self.lane(wire.source), self.lane(j)
            self._gate.wait(wire.source, True, i, target)
            sent = self._links.send(tensor, source, target, i)
            self._mailboxes[j].put(("value", wire, j, i), (sent, gradient))

    def value(self, wire: Wire, j: int, i: int) -> tuple[Tensor, bool]:
        """Micro-batch i's value on stage j, and whether it has a gradient; waits for it."""
        tensor, gradient = self._mailboxes[j].take(("value", wire, j, i))
        if wire.source == CALLER:
            tensor = self._links.enter(tensor, self.lane(j), i)
        else:
            tensor = self._links.receive(tensor, self.lane(wire.source), self.lane(j), i)
        if self._recorder is not None and j < self.n:
            self._recorder.arrived(self.lane(j))
        return tensor, gradient

    def send_gradient(self, wire: Wire, j: int, i: int, gradient: Tensor | None) -> None:
        """Send stage j's part of the gradient of micro-batch i's value back to its stage."""
        if gradient is not None and wire.source == CALLER:
            gradient = gradient.to(self._homes[wire.value, i])
        elif gradient is not None:
            if self.device(j) == self.device(wire.source):
                gradient = compact(gradient)  # it may wait there for long
            target = self.lane(wire.source)
            self._gate.wait(j, False, i, target)
            gradient = self._links.send(gradient, self.lane(j), target, i)
        self._mailboxes[wire.source].put(("gradient", wire, j, i), gradient)

    def gradient(self, wire: Wire, i: int) -> Tensor | None:
        """The gradient of micro-batch i's value, all readers' parts added; waits for them."""
        parts: list[Tensor | None] = []
        for j in self.wires.readers.get(wire, ()):
            part = self._mailboxes[wire.source].take(("gradient", wire, j, i))
            if part is not None and wire.source != CALLER:
                part = self._links.receive(part, self.lane(j), self.lane(wire.source), i)
            parts.append(part)
        if self._recorder is not None and wire.source != CALLER:
            self._recorder.arrived(self.lane(wire.source))
        return add_gradients(parts)

    def random(self, j: int, i: int) -> RandomStream | None:
        """Where micro-batch i's random numbers stand as stage j begins; None if it draws none.

        At the end, where they stand after all stages that draw some.
        """
        if j not in (*self._random_stages, self.n):
            return None
        taken: RandomStream | None = self._mailboxes[j].take(("random", None, j, i))
        return taken

    def pass_random(self, j: int, i: int, random: RandomStream | None) -> None:
        """Hand the random numbers on to the next stage that draws some, at last to the end."""
        if j == CALLER or j in self._random_stages:
            target = next((k for k in self._random_stages if k > j), self.n)
            self._mailboxes[target].put(("random", None, target, i), random)
