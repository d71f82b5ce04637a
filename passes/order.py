"""Schedules by name: the order in which each device runs its forwards and backwards.

Device d of p holds the stages d, d + p, d + 2p, ...: one of each *loop* through the devices; under
zb-v it holds d and 2p - 1 - d.
"""

from fxpipe.errors import ScheduleError
from fxpipe.passes import order_family
from fxpipe.passes.order_family import family
from fxpipe.passes.order_halved import zero_bubble_h1, zero_bubble_h2, zero_bubble_v
from fxpipe.schedule import Action, Kind, Schedule
from fxpipe.schedule_check import check

NAMES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "bfs",
    "zb-h1",
    "zb-h2",
    "zb-v",
    order_family.NAME,
)
LOOPED = ("interleaved", "bfs", order_family.NAME)


def usual_loops(name: str, n_devices: int) -> int:
    """Stages a device where nothing is said."""
    return 2 if name == "zb-v" or (name in ("interleaved", "bfs") and n_devices > 1) else 1


def build(name: str, n_devices: int, n_microbatches: int, loops: int = 1) -> Schedule:
    """The table of the schedule called `name`, one of `NAMES`.

    `loops` is the number of stages a device; more than one is for those in `LOOPED`, and two for
    zb-v. After the name of Pfeife's family its parameters may stand: `pfeife:B_l=4,B_f=2`. Raises
    ScheduleError.
    """
    kind, _, _ = name.partition(":")
    if kind not in NAMES or name != kind != order_family.NAME:
        raise ScheduleError(f"there is no schedule {name!r}: use one of {', '.join(NAMES)}")
    if kind == "zb-v":
        if loops != 2:
            raise ScheduleError(f"{loops} stages a device under zb-v: it is made of 2")
        return zero_bubble_v(n_devices, n_microbatches)
    if loops > 1 and (kind not in LOOPED or n_devices == 1):
        raise ScheduleError(
            f"{loops} stages a device under {name} on {n_devices} devices: several are for "
            f"{', '.join(LOOPED)}, on two devices or more"
        )
    if kind == order_family.NAME:
        return order_family.named(name, n_devices, n_microbatches, loops)
    if kind in LOOPED:
        looped = interleaved if kind == "interleaved" else breadth_first
        return looped(n_devices, n_microbatches, loops)
    flat = {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zb-h1": zero_bubble_h1,
        "zb-h2": zero_bubble_h2,
    }
    return flat[kind](n_devices, n_microbatches)


def given(table: Schedule, n_devices: int, n_microbatches: int, loops: int | None) -> Schedule:
    """A user's own `table`, which says what device holds what stage. Raises ScheduleError."""
    broken = []
    if len(table.rows) != n_devices:
        broken.append(f"rows: {len(table.rows)}, devices: {n_devices}; write a row for each device")
    if table.n_microbatches != n_microbatches:
        broken.append(f"micro-batches: {table.n_microbatches} in it, {n_microbatches} in a step")
    if loops is not None:
        broken.append(f"loops: {loops} asked for; the rows already say what a device holds")
    if broken:
        raise ScheduleError("\n  ".join(["the schedule table doesn't fit:", *broken]))
    check(table, table.stage_to_device, n_microbatches, written={})
    return table


def gpipe(n_stages: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards from the last micro-batch to the first.

    The backward order is torchgpipe's (arXiv 2004.09910, section 2.2): the one micro-batch that
    `except_last` does not recompute is let go first. Memory: every micro-batch is in flight.
    """
    forwards = range(n_microbatches)
    return Schedule(
        tuple(
            (
                *(Action(j, Kind.FORWARD, i) for i in forwards),
                *(Action(j, Kind.BACKWARD, i) for i in reversed(forwards)),
            )
            for j in range(n_stages)
        )
    )


def one_f_one_b(n_stages: int, n_microbatches: int) -> Schedule:
    """Warm-up of min(m, n - j) forwards on stage j, then backward and forward in turn.

    Memory: min(m, n - j) micro-batches are in flight on stage j, whatever m is. Source: PipeDream
    with flush (Narayanan et al., ICML 2021), DAPPLE (Fan et al., PPoPP 2021).
    """
    return family(n_stages, n_microbatches, loops=1, group=n_microbatches, prefetch=0)


def interleaved(n_devices: int, n_microbatches: int, loops: int) -> Schedule:
    """1F1B whose micro-batches go through the loops in groups of p, or a few more.

    The bubble is 1F1B's divided by the number of loops, at the cost of more messages and of more
    micro-batches in flight. Source: Megatron-LM (Narayanan et al., SC 2021, section 2.2), where m
    is a multiple of p; else the groups are as even as can be.
    """
    prefetch = n_devices - 1 if loops > 1 else 0
    group = min(n_devices, n_microbatches)
    return family(n_devices, n_microbatches, loops, group, prefetch)


def breadth_first(n_devices: int, n_microbatches: int, loops: int) -> Schedule:
    """Each loop takes all micro-batches before the next begins; backward the same way.

    As short as `interleaved` in time, and each stage's weights are in use once each way, which
    suits sharded ones. Memory: every micro-batch is in flight. Source: Lamy-Poirier, Breadth-First
    Pipeline Parallelism (MLSys 2023).
    """
    prefetch = n_microbatches + n_devices - 2
    return family(n_devices, n_microbatches, loops, n_microbatches, prefetch)
