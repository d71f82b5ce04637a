"""`schedule.csv` is a table that torch.distributed.pipelining loads, and gives back the same."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fxpipe.passes import order
from fxpipe.schedule import Schedule


def through_torch(table: Schedule, folder: Path) -> Schedule:
    """What torch's runtime holds, and writes, once it has checked `table` and added messages."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    ours, theirs = folder / "schedule.csv", folder / "theirs.csv"
    ours.write_text(table.to_csv())
    stage = SimpleNamespace(
        num_stages=table.n_stages, group_size=len(table.rows), group_rank=0, has_backward=True
    )
    runtime = _PipelineScheduleRuntime([stage], table.n_microbatches)
    runtime._load_csv(str(ours), format="compute_only")
    assert runtime.stage_index_to_group_rank == dict(enumerate(table.stage_to_device))
    runtime._dump_csv(str(theirs), format="compute_only")
    return Schedule.read(theirs)


@pytest.mark.parametrize("m", [3, 8])
@pytest.mark.parametrize("name", [*order.NAMES, "pfeife:B_l=3,B_f=1"])
def test_a_named_schedule_comes_back_as_it_was(name: str, m: int, tmp_path: Path) -> None:
    for loops in (
        (1, 2) if name.partition(":")[0] in order.LOOPED else (order.usual_loops(name, 3),)
    ):
        table = order.build(name, 3, m, loops)
        assert through_torch(table, tmp_path) == table


def test_a_table_of_whole_and_halved_backwards_comes_back_as_it_was(tmp_path: Path) -> None:
    table = Schedule.from_csv("0F0,0F1,2F0,2B0,0I0,2F1,0W0,2I1,2W1,0B1\n1F0,1F1,1B0,1I1,1W1\n")
    assert through_torch(table, tmp_path) == table
