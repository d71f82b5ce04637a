"""The simulator: what one training step of a schedule table takes in time and memory.

Rules, all of them:

- A device runs its row in order, one action at a time. F of stage j waits for F of stage j-1, B or
  I for its own F and for B or I of stage j+1, W for its own I; each waits for what is sent to it.
- When F of a stage ends, it sends one message to each later stage on another device that reads from
  it, nearest first; when B or I ends, the gradients go straight back the same way. A message holds
  its ordered pair of devices for latency + bytes / bandwidth; a pair carries one message at a time,
  in the sender's order. Stages on one device hand over for nothing.
- A device always holds its parameters, as many bytes of gradients, and its buffers. A stage holds,
  for each micro-batch, its saved bytes from the start of F to the end of B or W, what it receives
  from the start of the transfer to that end, the model's inputs from the start of F to that end,
  and its workspace while an action runs. If it recomputes the micro-batch, its saved bytes count
  from the start of B or I only, which takes the forward's time on top.
- An output that waits in its producer is not counted on its own: it is the receiver's from the
  start of the transfer, and part of the producer's saved bytes if the backward there needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.ir import Link
from fxpipe.schedule import Action, Kind, Schedule
from fxpipe.schedule_check import check


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage on one micro-batch. `input_bytes` are those of the model's inputs it reads.

    `weight_gradient_ms` is what of `backward_ms` is for weights alone.
    """

    forward_ms: float
    backward_ms: float
    parameter_bytes: int = 0
    buffer_bytes: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    workspace_bytes: int = 0
    weight_gradient_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """What stage `source` sends to stage `target` after F, and what gradients come back."""

    source: int
    target: int
    bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """One step. `spans` has the shape of the table's rows: (start, end) in ms of each action.

    `bubble` is the idle share of all devices' time from the step's start to its end.
    """

    step_ms: float
    bubble: float
    peak_bytes: tuple[int, ...]
    spans: tuple[tuple[tuple[float, float], ...], ...]


def simulate(
    schedule: Schedule,
    stages: Sequence[StageCost],
    messages: Sequence[Message],
    link: Link,
    recompute: Sequence[Sequence[bool]],
) -> Simulation:
    """Run one step of `schedule` on paper.

    `messages` has at most one entry for each pair of stages; `recompute[j][i]` says whether stage
    j recomputes micro-batch i. Raises ScheduleError where the table can't run.
    """
    return _Step(schedule, stages, messages, link, recompute).run()


class _Step:
    """A step under way: clocks of devices and links, what each action still waits for."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageCost],
        messages: Sequence[Message],
        link: Link,
        recompute: Sequence[Sequence[bool]],
    ) -> None:
        n, m = len(stages), schedule.n_microbatches
        self.schedule = schedule
        self.stages = stages
        self.recompute = recompute
        self.device = [0] * n
        for device, row in enumerate(schedule.rows):
            for action in row:
                self.device[action.stage] = device
        # For each kind, stage and micro-batch: how many actions it waits for, and until when.
        self.waits_forward = [[int(j > 0)] * m for j in range(n)]
        self.waits_backward = [[1 + int(j < n - 1)] * m for j in range(n)]
        self.ready_forward = [[0.0] * m for _ in range(n)]
        self.ready_backward = [[0.0] * m for _ in range(n)]
        self.halved: set[tuple[int, int]] = set()  # I has run
        # What each stage sends after F and after B, nearest first: (stage, bytes, ms).
        self.sends: list[list[tuple[int, int, float]]] = [[] for _ in stages]
        self.returns: list[list[tuple[int, int, float]]] = [[] for _ in stages]
        # What the end of B or W lets go of, besides workspace.
        self.held = [stage.saved_bytes + stage.input_bytes for stage in stages]
        for message in sorted(messages, key=lambda one: one.target - one.source):
            source, target = message.source, message.target
            if self.device[source] == self.device[target]:
                continue
            self.sends[source].append((target, message.bytes, link.transfer_ms(message.bytes)))
            self.held[target] += message.bytes
            if message.gradient_bytes:
                ms = link.transfer_ms(message.gradient_bytes)
                self.returns[target].append((source, message.gradient_bytes, ms))
                self.held[source] += message.gradient_bytes
        self.link_free: dict[tuple[int, int], float] = {}
        self.events: list[list[tuple[float, int]]] = [[] for _ in schedule.rows]
        self.spans: list[list[tuple[float, float]]] = [[] for _ in schedule.rows]

    def run(self) -> Simulation:
        rows = self.schedule.rows
        moved = True
        while moved:
            moved = False
            for device, row in enumerate(rows):
                spans = self.spans[device]
                clock = spans[-1][1] if spans else 0.0
                while len(spans) < len(row) and self._ready(row[len(spans)]):
                    clock = self._run_action(row[len(spans)], device, clock)
                    moved = True
        if any(len(spans) < len(row) for spans, row in zip(self.spans, rows, strict=True)):
            check(self.schedule, tuple(self.device), self.schedule.n_microbatches)
        step_ms = max((spans[-1][1] for spans in self.spans if spans), default=0.0)
        busy_ms = sum(end - start for spans in self.spans for start, end in spans)
        return Simulation(
            step_ms=step_ms,
            bubble=max(0.0, 1 - busy_ms / (len(rows) * step_ms)) if step_ms else 0.0,
            peak_bytes=tuple(self._peak_bytes(device) for device in range(len(rows))),
            spans=tuple(tuple(spans) for spans in self.spans),
        )

    def _ready(self, action: Action) -> bool:
        if action.kind is Kind.WEIGHT:
            return (action.stage, action.microbatch) in self.halved
        waits = self.waits_forward if action.kind is Kind.FORWARD else self.waits_backward
        return not waits[action.stage][action.microbatch]

    def _run_action(self, action: Action, device: int, clock: float) -> float:
        """Run it, send what it sends; the time it ends."""
        j, i = action.stage, action.microbatch
        cost = self.stages[j]
        events = self.events[device]
        if action.kind is Kind.FORWARD:
            start = max(clock, self.ready_forward[j][i])
            end = start + cost.forward_ms
            kept = cost.input_bytes + (0 if self.recompute[j][i] else cost.saved_bytes)
            events.append((start, kept + cost.workspace_bytes))
            events.append((end, -cost.workspace_bytes))
            self._allow(self.waits_backward, self.ready_backward, j, i, end)
            if j + 1 < len(self.stages):
                self._allow(self.waits_forward, self.ready_forward, j + 1, i, end)
            self._send(device, self.sends[j], self.ready_forward, i, end)
        elif action.kind is Kind.WEIGHT:
            start = clock
            end = start + cost.weight_gradient_ms
            events.append((start, cost.workspace_bytes))
            events.append((end, -cost.workspace_bytes - self.held[j]))
        else:
            start = max(clock, self.ready_backward[j][i])
            again, whole = self.recompute[j][i], action.kind is Kind.BACKWARD
            end = start + cost.backward_ms + (cost.forward_ms if again else 0.0)
            end -= 0.0 if whole else cost.weight_gradient_ms
            events.append((start, cost.workspace_bytes + (cost.saved_bytes if again else 0)))
            events.append((end, -cost.workspace_bytes - (self.held[j] if whole else 0)))
            if not whole:
                self.halved.add((j, i))
            if j > 0:
                self._allow(self.waits_backward, self.ready_backward, j - 1, i, end)
            self._send(device, self.returns[j], self.ready_backward, i, end)
        self.spans[device].append((start, end))
        return end

    @staticmethod
    def _allow(
        waits: list[list[int]], ready: list[list[float]], stage: int, i: int, at: float
    ) -> None:
        waits[stage][i] -= 1
        ready[stage][i] = max(ready[stage][i], at)

    def _send(
        self,
        device: int,
        outbox: list[tuple[int, int, float]],
        ready: list[list[float]],
        i: int,
        at: float,
    ) -> None:
        for stage, n_bytes, ms in outbox:
            pair = (device, self.device[stage])
            start = max(at, self.link_free.get(pair, 0.0))
            self.link_free[pair] = start + ms
            ready[stage][i] = max(ready[stage][i], start + ms)
            self.events[pair[1]].append((start, n_bytes))

    def _peak_bytes(self, device: int) -> int:
        held = sum(
            2 * cost.parameter_bytes + cost.buffer_bytes
            for cost, place in zip(self.stages, self.device, strict=True)
            if place == device
        )
        peak = held
        # At one instant, what is let go of (negative) comes before what is taken.
        for _, n_bytes in sorted(self.events[device]):
            held += n_bytes
            peak = max(peak, held)
        return peak
