"""Tables that a search begins with, and that of the step it ends with."""

from functools import lru_cache

from fxpipe.passes import order
from fxpipe.passes.search.judge import Found
from fxpipe.passes.simulate_numbers import KINDS
from fxpipe.schedule import Action, Schedule


@lru_cache(maxsize=1)  # for the searches of one plan
def tables(n_devices: int, n_microbatches: int, loops: tuple[int, ...]) -> tuple[Schedule, ...]:
    """The named schedules with as many stages a device."""
    found = []
    for name in order.NAMES:
        usual = order.usual_loops(name, n_devices)
        for count in loops if name in order.LOOPED and n_devices > 1 else (usual,):
            if count in loops:
                found.append(order.build(name, n_devices, n_microbatches, count))
    return tuple(found)


def table_of(found: Found, n_devices: int) -> Schedule:
    """The step that ran as a table."""
    rows: list[list[Action]] = [[] for _ in range(n_devices)]
    for d, kind, j, i in zip(*(x.tolist() for x in found.ran[:4]), strict=True):
        rows[d].append(Action(j, KINDS[kind], i))
    return Schedule(tuple(map(tuple, rows)))
