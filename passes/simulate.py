"""The simulator: what one training step of a schedule table takes in time and memory.

Rules, all of them:

- A device runs its row in order, one action at a time. F of stage j waits for F of stage j-1, B or
  I for its own F and for B or I of stage j+1, W for its own I; each waits for what is sent to it.
- When F of a stage ends, it sends one message to each later stage on another device that reads from
  it, nearest first; when B or I ends, the gradients go straight back the same way. A message holds
  its ordered pair of devices for latency + bytes / bandwidth; a pair carries one message at a time,
  in the sender's order. Stages on one device hand over for nothing. Where devices do the sending
  themselves, the actions before and after a message are longer by what it takes of their time.
- Where a host launches what a device does, no action starts before it begins to be launched, or
  ends before it is.
- A device always holds the static bytes of its stages: parameters, gradients, the optimizer's
  states, buffers; what several of its stages share, once.
- A stage holds, for each micro-batch, its saved bytes from the start of F to the end of B or W,
  what it receives from the start of the transfer to that end, the model's inputs from the start of
  F to that end, and its workspace while an action runs. If it recomputes the micro-batch, its saved
  bytes count from the start of B or I only, which takes the forward's time and workspace as well,
  and copies of the buffers it writes from the start of F to the end of B or W; of a stage with
  segments, what these compute again. What only passes through a stage counts until F ends; if it
  recomputes, until it has, but for what only the caller reads. A stage with arriving bytes holds
  them from the start of I to the end of W: what waits for W to use it.
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
from fxpipe.passes.simulate_costs import Message, StageCost
from fxpipe.passes.simulate_numbers import numbers, rows_of
from fxpipe.schedule import Action, Schedule
from fxpipe.schedule_check import check

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Simulation:
    """One step. `bubble` is the idle share of all devices' time from the step's start to its end.

    `starts` and `ends` are of the table's actions, row by row; `waited_for` is the action that each
    came right after: the one before it on its device, or one that it waited for; -1 for none.
    `memory` is what each device holds over time: (ms, bytes) at first and after each change.
    """

    schedule: Schedule
    step_ms: float
    bubble: float
    peak_bytes: tuple[int, ...]
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
    launched: _Floats = kernel.NOT_LAUNCHED,
) -> Simulation:
    """Run one step of `schedule` on paper.

    `messages` has at most one entry for each pair of stages; `recompute[j][i]` says whether stage
    j recomputes micro-batch i. Without `record`, memory over time is left out. `launched`, (2, the
    table's actions row by row), says when a host begins and ends to launch each. Raises
    ScheduleError where the table can't run.
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
        0,
        *given,
        record,
        launched,
    )
    if len(ran[0]) < len(rows[1]):
        check(schedule, tuple(device_of), m, written={})
    return _simulation(schedule, given.at_rest, ran, record)


def _simulation(
    schedule: Schedule, at_rest: _Ints, ran: Sequence[NDArray[Any]], record: bool
) -> Simulation:
    devices, _, _, _, starts, ends, waited_for, peak, log_device, log_ms, log_bytes = ran
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
