"""Ranks compute what one process does, over schedules, portals, ties and ragged batches."""

import re

import jobs
import pytest
import torch
import toys

from fxpipe.passes import order

EQUAL = ["equal", "equal"]
# Two stages on a rank, and stage 3 in the row before stage 2's is done with its backwards.
BY_HAND = (
    "0F0,0F1,3F0,3B0,3F1,0F2,3I1,0B0,0F3,3W1,3F2,3B2,0I1,3F3,3B3,0W1,0B2,0B3\n"
    "1F0,2F0,1F1,2F1,2B0,1B0,2I1,1F2,1B1,2W1,2F2,1F3,2F3,2B2,1B2,2B3,1B3\n"
)


@pytest.mark.parametrize("name", ["normed", "early"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "split"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_stage_on_each_rank(two, tmp_path, name, schedule, checkpoint):
    toy = toys.TOYS[name]
    toys.write(tmp_path, toy, 4, schedule, checkpoint)
    batches = (10, 8, 9) if name == "normed" else (10, 3, 7)  # a batch norm takes two rows
    assert two.run(jobs.steps, tmp_path, name, 4, batches, False) == EQUAL


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("name", ["tied", "noisy", "whole", "waves", "skips"])
@pytest.mark.parametrize("devices", [(0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 1, 0)])
def test_several_stages_on_a_rank(two, tmp_path, name, devices, checkpoint):
    toy = toys.TOYS[name]
    toys.write(tmp_path, toy, 3, checkpoint=checkpoint, devices=devices[: len(toy.parts)])
    assert two.run(jobs.steps, tmp_path, name, 3, (10, 2, 4), True) == EQUAL


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "bfs", BY_HAND])
def test_skips_under_schedules_with_several_stages_a_rank(two, tmp_path, schedule):
    table = schedule
    if schedule is not BY_HAND:
        table = order.build(schedule, 2, 4, 2).to_csv()
    devices = (0, 1, 1, 0) if schedule in ("zb-v", BY_HAND) else (0, 1, 0, 1)
    toys.write(tmp_path, toys.SKIPS, 4, devices=devices, table=table)
    assert two.run(jobs.steps, tmp_path, "skips", 4, (10, 3, 8), False) == EQUAL


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="where a build for CUDA finds no GPU, fake tensors leave a device guard behind that "
    "goes with the thread that used them: others then end in a segmentation fault",
)
@pytest.mark.parametrize("name", ["skips", "normed", "tied"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_stages_through_torch_compile(two, tmp_path, name, checkpoint):
    toys.write(tmp_path, toys.TOYS[name], 4, "1f1b", checkpoint, devices=(0, 1, 0, 1))
    assert two.run(jobs.compiled_steps, tmp_path, name, 4, (8, 10)) == EQUAL


def test_four_ranks(four, tmp_path):
    toys.write(tmp_path, toys.SKIPS, 4, "split")
    assert four.run(jobs.steps, tmp_path, "skips", 4, (10, 5), False) == ["equal"] * 4


def test_shapes_are_the_plans_whatever_the_batch(two, tmp_path):
    toys.write(tmp_path, toys.SKIPS, 4, devices=(0, 1, 0, 1))
    assert two.run(jobs.told, tmp_path, (10, 9, 4, 10)) == [1, 1]
    assert two.run(jobs.told, tmp_path, (10, 3)) == [2, 2]  # another number of micro-batches


def test_a_shape_that_depends_on_data_is_told_each_time(two, tmp_path):
    toys.write(tmp_path, toys.SKIPS, 4, devices=(0, 1, 0, 1))
    plan = (tmp_path / "plan.json").read_text()
    stages = plan.index('"stages"')
    unknown = re.sub(r'"batch",(\s+)8', r'"unknown",\g<1>8', plan[stages:])
    assert unknown != plan[stages:]
    (tmp_path / "plan.json").write_text(plan[:stages] + unknown)
    assert two.run(jobs.steps, tmp_path, "skips", 4, (10, 3, 9), False) == EQUAL


def test_each_rank_gives_the_inputs_that_its_own_stages_read(two, tmp_path):
    toys.write(tmp_path, toys.LATE, 4)
    errors, others = two.run(jobs.some_inputs, tmp_path)
    assert errors == others
    late, early, unknown = errors
    assert late == "rank 1: its stages read shift: give it to this rank too"
    assert early == "rank 0: its stages read x: give it to this rank too"
    assert "'mask' was no input of Late's forward" in unknown
