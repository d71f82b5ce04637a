"""Schedules: the order in which each device runs its forwards and backwards.

Device d of p holds the stages d, d + p, d + 2p, ...: one of each *loop* through the devices.
"""

from collections.abc import Sequence
from itertools import pairwise

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, Kind, Schedule

NAMES = ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1")
LOOPED = ("interleaved", "bfs")


def usual_loops(name: str, n_devices: int) -> int:
    """Stages a device where nothing is said."""
    return 2 if name in LOOPED and n_devices > 1 else 1


def build(name: str, n_devices: int, n_microbatches: int, loops: int = 1) -> Schedule:
    """The table of the schedule called `name`, one of `NAMES`.

    `loops` is the number of stages a device; more than one is for those in `LOOPED`. Raises
    ScheduleError.
    """
    if name not in NAMES:
        raise ScheduleError(f"there is no schedule {name!r}: use one of {', '.join(NAMES)}")
    if loops > 1 and (name not in LOOPED or n_devices == 1):
        raise ScheduleError(
            f"{loops} stages a device under {name} on {n_devices} devices: several are for "
            f"{' and '.join(LOOPED)}, on two devices or more"
        )
    if name == "gpipe":
        return gpipe(n_devices, n_microbatches)
    if name == "1f1b":
        return one_f_one_b(n_devices, n_microbatches)
    if name == "zb-h1":
        return zero_bubble_h1(n_devices, n_microbatches)
    if name == "interleaved":
        return interleaved(n_devices, n_microbatches, loops)
    return breadth_first(n_devices, n_microbatches, loops)


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
    return Schedule(
        tuple(
            _alternating(
                [Action(j, Kind.FORWARD, i) for i in range(n_microbatches)],
                [Action(j, Kind.BACKWARD, i) for i in range(n_microbatches)],
                ahead=n_stages - j,
            )
            for j in range(n_stages)
        )
    )


def zero_bubble_h1(n_stages: int, n_microbatches: int) -> Schedule:
    """1F1B with halved backwards: stage j computes weights' gradients j micro-batches later.

    What is left over fills the wait at the end: a third of 1F1B's bubble where the three parts take
    equally long. Memory: min(m, n) micro-batches are in flight on every stage. Source: Qi et al.,
    Zero Bubble Pipeline Parallelism (ICLR 2024), ZB-H1.
    """
    rows = []
    for j in range(n_stages):
        row = []
        for action in one_f_one_b(n_stages, n_microbatches).rows[j]:
            i = action.microbatch
            if action.kind is Kind.FORWARD:
                row.append(action)
                continue
            row.append(Action(j, Kind.INPUT, i))
            if i >= j:
                row.append(Action(j, Kind.WEIGHT, i - j))
        left = range(max(0, n_microbatches - j), n_microbatches)
        rows.append((*row, *(Action(j, Kind.WEIGHT, i) for i in left)))
    return Schedule(tuple(rows))


def interleaved(n_devices: int, n_microbatches: int, loops: int) -> Schedule:
    """1F1B whose micro-batches go through the loops in groups of p, or a few more.

    The bubble is 1F1B's divided by the number of loops, at the cost of more messages and of more
    micro-batches in flight. Source: Megatron-LM (Narayanan et al., SC 2021, section 2.2), where m
    is a multiple of p; else the groups are as even as can be.
    """
    n_groups = max(1, n_microbatches // n_devices)
    ends = [k * n_microbatches // n_groups for k in range(n_groups + 1)]
    longest = max(end - begin for begin, end in pairwise(ends))
    rows = []
    for device in range(n_devices):
        stages = range(device, n_devices * loops, n_devices)
        ahead = n_devices - device + (n_devices - device - 1 + (loops - 1) * longest) * (loops > 1)
        forwards = _in_groups(stages, Kind.FORWARD, ends)
        backwards = _in_groups(stages[::-1], Kind.BACKWARD, ends)
        rows.append(_alternating(forwards, backwards, ahead))
    return Schedule(tuple(rows))


def breadth_first(n_devices: int, n_microbatches: int, loops: int) -> Schedule:
    """Each loop takes all micro-batches before the next begins; backward the same way.

    As short as `interleaved` in time, and each stage's weights are in use once each way, which
    suits sharded ones. Memory: every micro-batch is in flight. Source: Lamy-Poirier, Breadth-First
    Pipeline Parallelism (MLSys 2023).
    """
    rows = []
    for device in range(n_devices):
        stages = range(device, n_devices * loops, n_devices)
        forwards = _in_groups(stages, Kind.FORWARD, (0, n_microbatches))
        backwards = _in_groups(stages[::-1], Kind.BACKWARD, (0, n_microbatches))
        rows.append((*forwards, *backwards))
    return Schedule(tuple(rows))


def _in_groups(stages: Sequence[int], kind: Kind, ends: Sequence[int]) -> list[Action]:
    """Each group of micro-batches, from one end to the next, through all the stages."""
    return [
        Action(stage, kind, i)
        for begin, end in pairwise(ends)
        for stage in stages
        for i in range(begin, end)
    ]


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> tuple[Action, ...]:
    """`ahead` forwards, or as many as there are; then a backward and a forward in turn."""
    row = list(forwards[:ahead])
    for k, backward in enumerate(backwards):
        row.append(backward)
        row.extend(forwards[ahead + k : ahead + k + 1])
    return tuple(row)
