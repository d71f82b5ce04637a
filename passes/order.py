"""Schedules: the order in which each device runs its forwards and backwards.

One stage per device: row j of the table is stage j.
"""

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, Kind, Schedule

NAMES = ("gpipe", "1f1b")


def build(name: str, n_stages: int, n_microbatches: int) -> Schedule:
    """The table of the schedule called `name`, one of `NAMES`. Raises ScheduleError."""
    if name == "gpipe":
        return gpipe(n_stages, n_microbatches)
    if name == "1f1b":
        return one_f_one_b(n_stages, n_microbatches)
    raise ScheduleError(f"there is no schedule {name!r}: use one of {', '.join(NAMES)}")


def gpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards from the last micro-batch to the first.

    The backward order is torchgpipe's (arXiv 2004.09910, section 2.2): the one micro-batch that
    `except_last` does not recompute is let go first. Memory: every micro-batch is in flight.
    """
    row = [(Kind.FORWARD, i) for i in range(n_microbatches)]
    row += [(Kind.BACKWARD, i) for i in reversed(range(n_microbatches))]
    return Schedule(tuple(_row(stage, row) for stage in range(n_stages)))


def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """Warm-up of min(m, n - j) forwards on stage j, then backward and forward in turn.

    Memory: min(m, n - j) micro-batches are in flight on stage j, whatever m is. Source: PipeDream
    with flush (Narayanan et al., ICML 2021), DAPPLE (Fan et al., PPoPP 2021).
    """
    rows = []
    for stage in range(n_stages):
        warm_up = min(n_microbatches, n_stages - stage)
        row = [(Kind.FORWARD, i) for i in range(warm_up)]
        for i in range(n_microbatches):
            row.append((Kind.BACKWARD, i))
            if i + warm_up < n_microbatches:
                row.append((Kind.FORWARD, i + warm_up))
        rows.append(_row(stage, row))
    return Schedule(tuple(rows))


def _row(stage: int, cells: list[tuple[Kind, int]]) -> tuple[Action, ...]:
    return tuple(Action(stage, kind, microbatch) for kind, microbatch in cells)
