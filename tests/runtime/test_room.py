"""A table whose micro-batches in flight don't fit a device is refused, with the cell."""

import dataclasses

import pytest
from toys import CHAIN, both, mean_loss

from fxpipe.errors import ScheduleError
from fxpipe.runtime import stream
from fxpipe.runtime.room import check_room
from fxpipe.schedule import Schedule

GIB = 2**30
GPIPE = "0F0,0F1,0F2,0B2,0B1,0B0\n"
HALVED = "0F0,0I0,0F1,0W0,0I1,0W1\n"


def stages(pipe, checkpoint="never"):
    """One stage of 1 GiB of parameters, that saves 4 and receives 1 for each micro-batch."""
    spec = dataclasses.replace(
        pipe.manifest.stages[0],
        checkpoint=checkpoint,
        parameter_bytes=GIB,
        saved_bytes=4 * GIB,
        received_bytes=GIB,
    )
    return [dataclasses.replace(pipe._stages[0], spec=spec)]


@pytest.mark.parametrize(
    ("table", "checkpoint", "most", "cell"),
    [
        (GPIPE, "never", 2 + 3 * 5, "0F0 0F1 [0F2] 0B2"),
        (GPIPE, "always", 2 + 3 + 4, "0F2 [0B2] 0B1"),
        (HALVED, "never", 2 + 2 * 5, "0F0 0I0 [0F1] 0W0"),
        ("0F0,0B0,0F1,0B1\n", "never", 2 + 5, "[0F0] 0B0"),
    ],
)
def test_what_is_in_flight_must_fit(tmp_path, table, checkpoint, most, cell):
    _, pipe = both(tmp_path, CHAIN)
    schedule = Schedule.from_csv(table)
    check_room(schedule, stages(pipe, checkpoint), [most * GIB], 1.0, 1.0)

    with pytest.raises(ScheduleError, match="needs more memory than device 0 has") as error:
        check_room(schedule, stages(pipe, checkpoint), [most * GIB - 1], 1.0, 1.0)
    assert cell in str(error.value)


def test_micro_batches_of_more_rows_need_more(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    schedule = Schedule.from_csv("0F0,0B0\n")
    check_room(schedule, stages(pipe), [12 * GIB], 2.0, 1.0)
    with pytest.raises(ScheduleError):
        check_room(schedule, stages(pipe), [12 * GIB], 2.1, 1.0)


def test_a_step_that_does_not_fit_is_refused_before_it_runs(tmp_path, monkeypatch):
    _, pipe = both(tmp_path, CHAIN)
    monkeypatch.setattr(stream, "capacities", lambda devices: [8] * len(devices))
    pipe._stages = tuple(stages(pipe)) + pipe._stages[1:]
    with pytest.raises(ScheduleError, match="at 0F0 it would hold"):
        pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    pipe(*CHAIN.inputs())
