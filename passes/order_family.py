"""The family of schedules (B, N_l, B_l, B_f) that Pfeife searches.

- B: micro-batches in a step.
- N_l: loops; device d of p holds the stages d, d + p, d + 2p, ...: one of each loop.
- B_l: micro-batches that go through a loop before the next loop begins, forward and backward. If B
  is no multiple of it, some groups are larger by one or more, as even as can be.
- B_f: forwards that are prefetched, more than must be done before the first backward. Device d
  takes p - d - 1 of them at most, as many as make up for messages on their way there and back;
  from p on, each device takes those over p - 1 too.

Device d begins with (N_l - 1) B_l + (p - d) + min(B_f, p - d - 1) + max(0, B_f - p + 1) forwards,
then backward and forward in turn. Members, on p devices:

| schedule                                                              | N_l | B_l | B_f       |
| --------------------------------------------------------------------- | --- | --- | --------- |
| GPipe (Huang et al., 2019), TeraPipe (Li et al., 2021; spans of       |     |     |           |
| tokens as micro-batches)                                              | 1   | B   | B + p - 2 |
| PipeDream with flush (Narayanan et al., 2021), DAPPLE's policy A      | 1   | B   | 0         |
| DAPPLE (Fan et al., 2021), policy B                                   | 1   | B   | p - 1     |
| Megatron-LM's looped 1F1B (Narayanan et al., SC 2021)                 | N_l | p   | p - 1     |
| Breadth-first (Lamy-Poirier, 2023)                                    | N_l | B   | B + p - 2 |

Source: Jhoo et al., Pfeife (ICML 2025). The number of forwards is that of its published code
(github.com/MerHS/pfeife, schedule/scheduler.py) for B_f < p, which is as far as that goes.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, Kind, Schedule

NAME = "pfeife"
_PARAMETER = re.compile(r"(B_l|B_f)=(\d+)")


def family(n_devices: int, n_microbatches: int, loops: int, group: int, prefetch: int) -> Schedule:
    """The member (B, N_l, B_l, B_f) = (n_microbatches, loops, group, prefetch).

    Memory: a device holds as many pairs of stage and micro-batch as it begins with forwards. Raises
    ScheduleError where so small a group would let a device wait for itself.
    """
    p, m = n_devices, n_microbatches
    least = min(p, m) if loops > 1 else 1
    if not least <= group <= m:
        raise ScheduleError(
            f"B_l={group} micro-batches through a loop before the next loop begins: with {loops} "
            f"on {p} devices and {m} micro-batches in all, use {least} to {m}"
        )
    ends = [k * m // (m // group) for k in range(m // group + 1)]
    longest = max(end - begin for begin, end in pairwise(ends))
    rows = []
    for d in range(p):
        stages = range(d, p * loops, p)
        prefetched = min(prefetch, p - d - 1) + max(0, prefetch - p + 1)
        forwards = _in_groups(stages, Kind.FORWARD, ends)
        backwards = _in_groups(stages[::-1], Kind.BACKWARD, ends)
        ahead = (loops - 1) * longest + p - d + prefetched
        rows.append(_alternating(forwards, backwards, ahead))
    return Schedule(tuple(rows))


def named(text: str, n_devices: int, n_microbatches: int, loops: int) -> Schedule:
    """The member that text such as `pfeife:B_l=4,B_f=2` names.

    Left out, B_l is p under several loops, else B, and B_f is 0. Raises ScheduleError.
    """
    _, colon, written = text.partition(":")
    given = {"B_l": min(n_devices, n_microbatches) if loops > 1 else n_microbatches, "B_f": 0}
    for part in written.split(",") if colon else ():
        match = _PARAMETER.fullmatch(part.strip())
        if match is None:
            raise ScheduleError(
                f"{part!r} in schedule {text!r}: {NAME} has the parameters B_l (micro-batches "
                "through a loop before the next begins) and B_f (forwards that are prefetched), "
                f"as in {NAME}:B_l=4,B_f=2; how many micro-batches and loops there are is said "
                "as for other schedules"
            )
        given[match[1]] = int(match[2])
    return family(n_devices, n_microbatches, loops, given["B_l"], given["B_f"])


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
