"""Whether a table's step fits the devices, by what was predicted of each stage."""

from collections.abc import Iterator, Sequence

from fxpipe.errors import ScheduleError
from fxpipe.runtime.checkpoint import recomputes
from fxpipe.runtime.stage import Stage
from fxpipe.schedule import Action, Kind, Schedule
from fxpipe.schedule_check import grid

_GIB = 2**30


def check_room(
    schedule: Schedule,
    stages: Sequence[Stage],
    capacities: Sequence[int],
    share: float,
    factor: float,
) -> None:
    """Raise ScheduleError, with the cell marked, where a device would hold more than it has.

    A device holds its stages' parameters and `factor` times as many bytes of gradients and
    optimizer states, and of each micro-batch in flight what its stages receive and save for
    backward, `share` times the predicted bytes.
    """
    for device, (row, capacity) in enumerate(zip(schedule.rows, capacities, strict=True)):
        for place, held in enumerate(held_during(schedule, row, stages, share, factor)):
            if held > capacity:
                raise ScheduleError(
                    f"the schedule table needs more memory than device {device} has: at "
                    f"{row[place]} it would hold {held / _GIB:.2f} GiB of {capacity / _GIB:.2f}. "
                    "Let fewer micro-batches be in flight there, make them smaller, or set the "
                    "checkpoint of its stages to always in plan.json\n  "
                    + "\n  ".join(grid(schedule, [(device, place)]))
                )


def held_during(
    schedule: Schedule,
    row: Sequence[Action],
    stages: Sequence[Stage],
    share: float,
    factor: float,
) -> Iterator[float]:
    """The bytes that a device holds during each action of its row."""
    own = {action.stage for action in row}
    held = (1 + factor) * sum(stages[j].spec.parameter_bytes for j in own)
    for action in row:
        stage = stages[action.stage]
        again = recomputes(stage.spec, action.microbatch, schedule.n_microbatches)
        received, saved = share * stage.spec.received_bytes, share * stage.spec.saved_bytes
        if action.kind is Kind.FORWARD:
            held += received if again else received + saved
        elif action.kind.sends_back and again:
            held += saved
        yield held
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            held -= received + saved
