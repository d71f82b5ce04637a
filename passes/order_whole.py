"""Which backwards stay halved: those whose halving shortens the step, and no others.

A backward in two halves takes longer than a whole one, and holds more until its second half. What
it gains is that the stage before need not wait for the second half, and that this can fill a wait:
in a table where all are halved that is true of few.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from fxpipe.errors import ScheduleError
from fxpipe.ir import Estimate
from fxpipe.passes.simulate import Simulation
from fxpipe.schedule import Action, Kind, Schedule

# Tables tried at most, and actions in all of them: where there are more halves than that allows,
# some are tried together. It adds to the time that a search was given.
_MOST_TRIES, _MOST_ACTIONS = 100, 1_000_000
_LONGER = 1e-9  # of the step: what adding up in another order may change


def whole_where_it_pays(
    schedule: Schedule,
    evaluate: Callable[..., Estimate | Simulation],
    capacity_bytes: Sequence[int],
) -> Schedule:
    """`schedule` with those backwards whole whose halving gains nothing.

    `evaluate(schedule=...)` predicts a step. Nothing is gained where that gets no longer, and no
    device's peak rises over what it has, unless it did before. Where that is shorter, all are
    whole.
    """
    if not schedule.split:
        return schedule
    found = evaluate(schedule=schedule)
    limits = [max(*both) for both in zip(found.peak_bytes, capacity_bytes, strict=True)]
    table, step_ms = schedule, found.step_ms

    def step_of(tried: Schedule) -> float:
        try:
            found = evaluate(schedule=tried)
        except ScheduleError:  # devices would wait for each other
            return inf
        over = (peak > most for peak, most in zip(found.peak_bytes, limits, strict=True))
        return inf if any(over) else found.step_ms

    own = _with_own_halves(schedule)
    if step_of(own) <= step_ms * (1 + _LONGER):
        table = own
    halved, every = _halved(table), all_whole(table)
    tries = max(2, min(_MOST_TRIES, _MOST_ACTIONS // sum(map(len, table.rows))))
    together = -(-2 * len(halved) // tries)
    for k in range(0, len(halved), together):
        for second in (False, True):
            tried = _merged(table, halved[k : k + together], second)
            tried_ms = step_of(tried)
            if tried_ms <= step_ms * (1 + _LONGER):
                table, step_ms = tried, min(tried_ms, step_ms)
                break
    return every if step_of(every) <= step_ms * (1 + _LONGER) else table


def all_whole(schedule: Schedule) -> Schedule:
    """`schedule` with all backwards whole, each where its first half is: it can run as well."""
    return _merged(schedule, _halved(schedule), second=False)


def _halved(schedule: Schedule) -> list[Action]:
    return [action for row in schedule.rows for action in row if action.kind is Kind.INPUT]


def _merged(schedule: Schedule, halved: Sequence[Action], second: bool) -> Schedule:
    """These backwards whole, where I is or, if `second`, where W is."""
    kept, dropped = Kind.INPUT, Kind.WEIGHT
    if second:
        kept, dropped = dropped, kept
    whole = {(one.stage, one.microbatch) for one in halved}

    def merged(action: Action) -> Action | None:
        if (action.stage, action.microbatch) not in whole or action.kind not in (kept, dropped):
            return action
        return replace(action, kind=Kind.BACKWARD) if action.kind is kept else None

    return Schedule(
        tuple(
            tuple(one for action in row if (one := merged(action)) is not None)
            for row in schedule.rows
        )
    )


def _with_own_halves(schedule: Schedule) -> Schedule:
    """The same step, in which the W after an I is of the same micro-batch if it is of its stage.

    All W of a stage take equally long, so two of them may change places.
    """
    return Schedule(tuple(map(_row_with_own_halves, schedule.rows)))


def _row_with_own_halves(row: Sequence[Action]) -> tuple[Action, ...]:
    made = list(row)
    place = {action: k for k, action in enumerate(made)}
    for k in range(len(made) - 1):
        first, after = made[k], made[k + 1]
        if (first.kind, after.kind, first.stage) != (Kind.INPUT, Kind.WEIGHT, after.stage):
            continue
        own = replace(after, microbatch=first.microbatch)
        other = place[own]
        made[k + 1], made[other] = own, after
        place[own], place[after] = k + 1, other
    return tuple(made)
