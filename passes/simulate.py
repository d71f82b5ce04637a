"""The simulator: what one training step of a schedule table takes in time and memory.

Rules, all of them:

- A device runs its row in order, one action at a time. F of stage j waits for F of stage j-1, B or
  I for its own F and for B or I of stage j+1, W for its own I; each waits for what is sent to it.
- When F of a stage ends, it sends one message to each later stage on another device that reads from
  it, nearest first; when B or I ends, the gradients go straight back the same way. A message holds
  its ordered pair of devices for latency + bytes / bandwidth; a pair carries one message at a time,
  in the sender's order. Stages on one device hand over for nothing. Where devices do the sending
  themselves, the actions before and after a message are longer by what it takes of their time.
- A device always holds the static bytes of its stages: parameters, gradients, the optimizer's
  states, buffers; what several of its stages share, once.
- A stage holds, for each micro-batch, its saved bytes from the start of F to the end of B or W,
  what it receives from the start of the transfer to that end, the model's inputs from the start of
  F to that end, and its workspace while an action runs. If it recomputes the micro-batch, its saved
  bytes count from the start of B or I only, which takes the forward's time and workspace as well,
  and copies of the buffers it writes from the start of F to the end of B or W; of a stage with
  segments, what these compute again. What only passes through a stage that does not recompute
  counts until F ends. A stage with arriving bytes holds them from the start of I to the end of W:
  what waits for W to use it.
- The times of a model's actions are but near what they will be, and a message may come sooner: a
  stage that has a workspace holds what it receives from the start of the action that sends it.
- An output that waits in its producer is not counted on its own: it is the receiver's from the
  start of the transfer, and part of the producer's saved bytes if the backward there needs it. What
  a stage hands to one on its own device, a value and then its gradient, it holds itself from the
  start of F to the end of B or W.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir import Network
from fxpipe.passes import simulate_kernel as kernel
from fxpipe.schedule import Action, Kind, Schedule
from fxpipe.schedule_check import check

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]

KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage on one micro-batch. `input_bytes` are those of the model's inputs it reads.

    `weight_gradient_ms` is what of `backward_ms` is for weights alone. The stage's segments, if it
    has any, compute `again_bytes` of what they save again, in `again_ms`, in every backward. If its
    backward is halved, the first half takes `halving_ms` longer than its part of the whole, and
    `arriving_bytes`, gradients most of all, wait for the second; each part has a workspace of its
    own. `passing_bytes` of what it receives are gone after F, unless it recomputes; then
    `written_bytes` are copies of the buffers that F writes. `shared` names what of its static bytes
    other stages have too, such as a tied weight: a device holds it once.
    """

    forward_ms: float
    backward_ms: float
    static_bytes: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    weight_gradient_ms: float = 0.0
    again_ms: float = 0.0
    again_bytes: int = 0
    arriving_bytes: int = 0
    passing_bytes: int = 0
    halving_ms: float = 0.0
    written_bytes: int = 0
    input_workspace_bytes: int = 0
    weight_workspace_bytes: int = 0
    shared: tuple[tuple[str, int], ...] = ()

    def workspace_of(self, kind: Kind, again: bool) -> int:
        """What an action of this kind needs while it runs, on a micro-batch recomputed or not."""
        forward = self.forward_workspace_bytes
        if kind is Kind.FORWARD:
            return forward + (0 if again else self.passing_bytes)
        if kind is Kind.WEIGHT:
            return self.weight_workspace_bytes
        whole = kind is Kind.BACKWARD
        own = self.backward_workspace_bytes if whole else self.input_workspace_bytes
        return max(own, forward) if again else own


@dataclass(frozen=True, slots=True)
class Message:
    """What stage `source` sends to stage `target` after F, and what gradients come back, if any.

    It is so many `values` and `gradients`. If both are on one device, `source` holds `handed_bytes`
    more until its backward has ended.
    """

    source: int
    target: int
    bytes: int
    gradient_bytes: int | None
    handed_bytes: int = 0
    values: int = 1
    gradients: int = 1


@dataclass(frozen=True, slots=True)
class Numbers:
    """Stages, messages, links and recomputation as `simulate_kernel.run` takes them."""

    device_of: _Ints
    lasts: _Floats
    keeps: _Ints
    comes_back: _Ints
    workspace: _Ints
    recompute: NDArray[np.bool_]
    outbox_ends: _Ints
    receivers: _Ints
    sizes: _Ints
    transfers: _Floats
    at_rest: _Ints
    arriving: _Ints

    def __iter__(self) -> Any:
        return (getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True)
class Simulation:
    """One step. `bubble` is the idle share of all devices' time from the step's start to its end.

    `peak_at_ms` is when each device is at its peak for the first time. `starts` and `ends` are of
    the table's actions, row by row; `waited_for` is the action that each came right after: the one
    before it on its device, or one that it waited for; -1 for none.
    """

    schedule: Schedule
    step_ms: float
    bubble: float
    peak_bytes: tuple[int, ...]
    peak_at_ms: tuple[float, ...]
    starts: _Floats
    ends: _Floats
    waited_for: _Ints
    memory: tuple[tuple[tuple[float, int], ...], ...]

    @cached_property
    def spans(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """In the shape of the table's rows: (start, end) in ms of each action."""
        both = iter(zip(self.starts.tolist(), self.ends.tolist(), strict=True))
        return tuple(tuple(next(both) for _ in row) for row in self.schedule.rows)

    @cached_property
    def critical(self) -> tuple[Action, ...]:
        """The actions that the step's length hangs on, in order of time.

        Each began when the one before it had ended, or when what that one sent had arrived.
        """
        actions = [action for row in self.schedule.rows for action in row]
        path = []
        k = int(np.argmax(self.ends)) if actions else -1
        while k >= 0:
            path.append(actions[k])
            k = int(self.waited_for[k])
        return tuple(reversed(path))


def simulate(
    schedule: Schedule,
    stages: Sequence[StageCost],
    messages: Sequence[Message],
    network: Network,
    recompute: Sequence[Sequence[bool]],
    *,
    record: bool = True,
) -> Simulation:
    """Run one step of `schedule` on paper.

    `messages` has at most one entry for each pair of stages; `recompute[j][i]` says whether stage
    j recomputes micro-batch i. Without `record`, memory over time is left out. Raises ScheduleError
    where the table can't run.
    """
    n, m = len(stages), schedule.n_microbatches
    device_of = [0] * n
    for device, row in enumerate(schedule.rows):
        for action in row:
            device_of[action.stage] = device
    given = numbers(stages, messages, network, device_of, recompute, len(schedule.rows))
    rows = rows_of(schedule)
    ran = kernel.run(
        *rows,
        np.empty((0, 0, 0)),
        np.empty((0, 0), np.bool_),
        np.empty(0, np.int64),
        0.0,
        *given,
        record,
    )
    if len(ran[0]) < len(rows[1]):
        check(schedule, tuple(device_of), m)
    return _simulation(schedule, given.at_rest, ran, record)


def _simulation(
    schedule: Schedule, at_rest: _Ints, ran: Sequence[NDArray[Any]], record: bool
) -> Simulation:
    devices, _, _, _, starts, ends, waited_for, peak, peak_at, log_device, log_ms, log_bytes = ran
    # A device starts its actions in its row's order.
    by_row = np.argsort(devices, kind="stable")
    place = np.empty(len(by_row) + 1, np.int64)
    place[by_row] = np.arange(len(by_row))
    place[-1] = -1
    step_ms = float(ends.max(initial=0.0))
    busy_ms = float((ends - starts).sum())
    n_devices = len(schedule.rows)
    return Simulation(
        schedule=schedule,
        step_ms=step_ms,
        bubble=max(0.0, 1 - busy_ms / (n_devices * step_ms)) if step_ms else 0.0,
        peak_bytes=tuple(peak.tolist()),
        peak_at_ms=tuple(peak_at.tolist()),
        starts=starts[by_row],
        ends=ends[by_row],
        waited_for=place[waited_for[by_row]],
        memory=tuple(
            ((0.0, held), *zip(log_ms[of].tolist(), log_bytes[of].tolist(), strict=True))
            for held, of in (
                (int(at_rest[device]), log_device == device)
                for device in range(n_devices if record else 0)
            )
        ),
    )


def rows_of(schedule: Schedule) -> tuple[_Ints, NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The table as the kernel takes it: where rows end, kinds, stages, micro-batches."""
    flat = [action for row in schedule.rows for action in row]
    return (
        np.cumsum([len(row) for row in schedule.rows]),
        np.fromiter((_NUMBERS[action.kind] for action in flat), np.int8, len(flat)),
        np.fromiter((action.stage for action in flat), np.int32, len(flat)),
        np.fromiter((action.microbatch for action in flat), np.int32, len(flat)),
    )


def numbers(
    stages: Sequence[StageCost],
    messages: Sequence[Message],
    network: Network,
    device_of: Sequence[int],
    recompute: Sequence[Sequence[bool]],
    n_devices: int,
) -> Numbers:
    """What the kernel takes, of stage j on device `device_of[j]`."""
    n = len(stages)
    # Outbox 2 j is stage j's after F, 2 j + 1 its outbox after the backward, nearest first.
    outboxes: list[list[tuple[int, int, float]]] = [[] for _ in range(2 * n)]
    sending_ms = np.zeros((n, 2))  # of each F and of each backward, both ends' part
    for message in sorted(messages, key=lambda one: one.target - one.source):
        ends = message.source, message.target
        source, target = (device_of[j] for j in ends)
        if source == target:
            continue
        there, back = network.between(source, target), network.between(target, source)
        outboxes[2 * ends[0]].append((ends[1], message.bytes, there.transfer_ms(message.bytes)))
        sending_ms[ends, 0] += there.busy_ms(message.values, message.bytes)
        size = message.gradient_bytes
        if size is not None:
            outboxes[2 * ends[1] + 1].append((ends[0], size, back.transfer_ms(size)))
            sending_ms[ends, 1] += back.busy_ms(message.gradients, size)
    slots = [slot for outbox in outboxes for slot in outbox]
    times = [_times(cost, *ms) for cost, ms in zip(stages, sending_ms.tolist(), strict=True)]
    return Numbers(
        device_of=np.array(device_of, np.int64),
        lasts=np.array(times, np.float64).reshape(n, 4, 2).transpose(1, 0, 2).copy(),
        keeps=np.array(
            [
                (c.saved_bytes + c.input_bytes - c.passing_bytes, c.input_bytes + c.written_bytes)
                for c in stages
            ],
            np.int64,
        )
        + np.array(handed_bytes(messages, device_of), np.int64)[:, None],
        comes_back=np.array([(c.again_bytes, c.saved_bytes) for c in stages], np.int64),
        workspace=np.array(
            [[(c.workspace_of(k, False), c.workspace_of(k, True)) for c in stages] for k in KINDS],
            np.int64,
        ),
        recompute=np.array(recompute, np.bool_),
        outbox_ends=np.cumsum([len(outbox) for outbox in outboxes]),
        receivers=np.array([stage for stage, _, _ in slots], np.int64),
        sizes=np.array([size for _, size, _ in slots], np.int64),
        transfers=np.array([ms for _, _, ms in slots], np.float64),
        at_rest=np.array(resting_bytes(stages, device_of, n_devices), np.int64),
        arriving=np.array([cost.arriving_bytes for cost in stages], np.int64),
    )


def resting_bytes(
    stages: Sequence[StageCost], device_of: Sequence[int], n_devices: int
) -> list[int]:
    """What each device holds between steps."""
    held = [0] * n_devices
    shared: list[dict[str, int]] = [{} for _ in held]
    for cost, device in zip(stages, device_of, strict=True):
        held[device] += cost.static_bytes - sum(size for _, size in cost.shared)
        shared[device].update(cost.shared)
    return [own + sum(sizes.values()) for own, sizes in zip(held, shared, strict=True)]


def handed_bytes(messages: Sequence[Message], device_of: Sequence[int]) -> list[int]:
    """What each stage holds of what it hands to others on its device."""
    held = [0] * len(device_of)
    for message in messages:
        if device_of[message.source] == device_of[message.target]:
            held[message.source] += message.handed_bytes
    return held


def _times(cost: StageCost, there_ms: float, back_ms: float) -> list[tuple[float, float]]:
    """By kind: how long it takes, and how long if the micro-batch is recomputed.

    F sends and receives for `there_ms`, B or I for `back_ms`.
    """
    forward, backward = cost.forward_ms, cost.backward_ms + cost.again_ms + back_ms
    weight = cost.weight_gradient_ms
    first = backward - weight + cost.halving_ms
    return [
        (forward + there_ms, forward + there_ms),
        (backward, backward + forward),
        (first, first + forward),
        (weight, weight),
    ]
