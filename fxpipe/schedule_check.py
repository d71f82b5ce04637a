"""Whether a table can run: every broken rule, and the table with the wrong cells marked."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fxpipe.errors import ScheduleError
from fxpipe.schedule import Action, Kind, Schedule

_AROUND = 6  # cells that are shown before and after a wrong one
_MOST_TOLD = 20  # broken rules

Wrong = tuple[int, int]  # device, place in its row


def check(
    schedule: Schedule,
    stage_to_device: Sequence[int],
    n_microbatches: int,
    written: Mapping[int, str],
) -> None:
    """Raise ScheduleError, naming the broken rules, unless the table can run.

    Rules: each stage's F of each micro-batch stands once, and its B once, or its I and its W, in
    the row of the stage's device; nothing else stands there; run in order, row by row, no device
    waits forever. `written` has, by stage, a buffer that its F writes if it does: such a stage runs
    its F by number of the micro-batch, as the model would.
    """
    broken, wrong = _misplaced(schedule, stage_to_device, n_microbatches)
    if not broken:
        broken, wrong = _disordered(schedule, written)
    if not broken:
        broken, wrong = _deadlock(schedule)
    if broken:
        told, more = broken[:_MOST_TOLD], len(broken) - _MOST_TOLD
        told += [f"and {more} more like that"] if more > 0 else []
        raise ScheduleError(
            "\n  ".join(["the schedule table can't run:", *told, *grid(schedule, wrong)])
        )


def grid(schedule: Schedule, wrong: Iterable[Wrong]) -> list[str]:
    """The rows that have wrong cells, a line each, around the first of them: `0F0 [0B0] 0F1`."""
    places: dict[int, list[int]] = {}
    for device, place in sorted(wrong):
        places.setdefault(device, []).append(place)
    return [_line(device, schedule.rows[device], marked) for device, marked in places.items()]


def _line(device: int, row: Sequence[Action], marked: Sequence[int]) -> str:
    begin, end = max(0, marked[0] - _AROUND), marked[0] + _AROUND + 1
    cells = [f"[{a}]" if k in marked else str(a) for k, a in enumerate(row)]
    shown = ["..."] * (begin > 0) + cells[begin:end] + ["..."] * (end < len(cells))
    return f"row {device}: {' '.join(shown)}"


def _misplaced(
    schedule: Schedule, stage_to_device: Sequence[int], n_microbatches: int
) -> tuple[list[str], list[Wrong]]:
    n_stages = len(stage_to_device)
    broken: list[str] = []
    wrong: list[Wrong] = []
    seen: set[Action] = set()
    for device, row in enumerate(schedule.rows):
        for place, action in enumerate(row):
            message = None
            if action.stage >= n_stages or action.microbatch >= n_microbatches:
                message = (
                    f"{action} on device {device}: the plan's stages are 0 to {n_stages - 1}, its "
                    f"micro-batches 0 to {n_microbatches - 1}"
                )
            elif action in seen:
                message = f"{action} stands twice"
            elif stage_to_device[action.stage] != device:
                where = stage_to_device[action.stage]
                message = f"{action} stands on device {device}, its stage on {where}"
            if message is not None:
                broken.append(message)
                wrong.append((device, place))
            seen.add(action)
    wanted = ((j, i) for j in range(n_stages) for i in range(n_microbatches))
    return broken + [text for j, i in wanted for text in _incomplete(seen, j, i)], wrong


def _incomplete(seen: set[Action], j: int, i: int) -> Iterator[str]:
    forward, backward, given, weight = (Action(j, kind, i) in seen for kind in Kind)
    if not forward:
        yield f"{j}F{i} is missing"
    if backward and (given or weight):
        yield f"{j}B{i} is the whole backward, and so are {j}I{i} and {j}W{i}: write one or the two"
    elif not (backward or given or weight):
        yield f"{j}B{i} is missing"
    elif given != weight:
        there, missing = "IW" if given else "WI"
        yield f"{j}{missing}{i} is missing, the other half of {j}{there}{i}"


def _disordered(schedule: Schedule, written: Mapping[int, str]) -> tuple[list[str], list[Wrong]]:
    broken: list[str] = []
    wrong: list[Wrong] = []
    for device, row in enumerate(schedule.rows):
        last: dict[int, Action] = {}
        for place, action in enumerate(row):
            if action.kind is not Kind.FORWARD or action.stage not in written:
                continue
            before = last.get(action.stage, action)
            if before.microbatch > action.microbatch:
                broken.append(
                    f"{action} comes after {before}, but stage {action.stage} writes the buffer "
                    f"{written[action.stage]!r}: its F must come by number"
                )
                wrong.append((device, place))
            last[action.stage] = action
    return broken, wrong


def _deadlock(schedule: Schedule) -> tuple[list[str], list[Wrong]]:
    done: set[Action] = set()
    reached = [0] * len(schedule.rows)
    for cycle in schedule.clock():
        done.update(action for action in cycle if action is not None)
        reached = [n + (action is not None) for n, action in zip(reached, cycle, strict=True)]
    stuck = [
        (device, place)
        for device, (row, place) in enumerate(zip(schedule.rows, reached, strict=True))
        if place < len(row)
    ]
    broken = []
    for device, place in stuck:
        action = schedule.rows[device][place]
        missing = ", ".join(str(a) for a in schedule.needs(action) if a not in done)
        broken.append(f"device {device} waits forever at {action} for {missing}")
    return broken, stuck
