"""When, in a rank's row, what others send it has come, and how much less it holds than at most.

By the plan, if the table is the one that was planned; else by the clock, each action taking one
cycle.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxpipe.runtime import trace
from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.schedule import Action, Schedule


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Of each action when what it makes `comes`, and when it `ends`.

    `spare_bytes` are what each rank holds less during each of its actions than at its fullest, None
    where that isn't known.
    """

    comes: Mapping[Action, float]
    ends: Mapping[Action, float]
    spare_bytes: Sequence[Sequence[int]] | None = None


def by_clock(schedule: Schedule) -> Foreseen:
    """What an action makes has come in the cycle after it."""
    cycles = {a: float(k) for k, cycle in enumerate(schedule.clock()) for a in cycle if a}
    return Foreseen(cycles, cycles)


def planned(estimate: EstimateSpec, schedule: Schedule) -> Foreseen | None:
    """By the plan: what is sent counts from when it begins to be made. None of another table."""
    if not len(schedule.rows) == len(estimate.timeline) == len(estimate.memory):
        return None
    rows: list[list[trace.Event]] = [[] for _ in schedule.rows]
    for event in trace.predicted(estimate.timeline):
        rows[event.lane].append(event)
    if tuple(tuple(Action.parse(event.name) for event in row) for row in rows) != schedule.rows:
        return None
    events = {Action.parse(event.name): event for row in rows for event in row}
    held = [
        [*_most_during(row, changes)]
        for row, changes in zip(rows, trace.held(estimate.memory), strict=True)
    ]
    spare = [[max(row, default=0) - n_bytes for n_bytes in row] for row in held]
    return Foreseen(
        comes={action: event.start_ms for action, event in events.items()},
        ends={action: event.end_ms for action, event in events.items()},
        spare_bytes=spare,
    )


def _most_during(row: Sequence[trace.Event], changes: Sequence[tuple[float, int]]) -> Iterator[int]:
    """The most that is held from when each action begins on, and before it ends."""
    times = [ms for ms, _ in changes]
    for event in row:
        first = max(bisect_right(times, event.start_ms) - 1, 0)
        last = max(bisect_left(times, event.end_ms), first + 1)
        yield max(n_bytes for _, n_bytes in changes[first:last])
