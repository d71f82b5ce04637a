"""A runner's closures on every rank are the plain program."""

import re
from dataclasses import replace

import closure_jobs
import jobs
import pytest
import toys
from part_toy import write_part

from fxpipe.passes import order
from fxpipe.runtime.manifest import Manifest

# Stages of two ranks: the table of the schedule's name, and where each stage is.
TABLES = {
    "gpipe": (0, 1),
    "1f1b": (0, 1),
    "split": (0, 1),
    "interleaved": (0, 1, 0, 1),
    "zb-v": (0, 1, 1, 0),
}

EQUAL = ["equal", "equal"]


def alike(digests):
    """Whether all ranks hold the very same gradients around the pipeline."""
    return len(set(digests)) == 1


@pytest.mark.parametrize("frozen", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "schedule", "checkpoint"),
    [
        ("early", "gpipe", "never"),
        ("early", "1f1b", "always"),
        ("early", "split", "never"),
        ("normed", "split", "always"),
        ("skips", "interleaved", "never"),
        ("skips", "zb-v", "never"),
    ],
)
def test_closures_compute_what_the_plain_program_does(
    two, tmp_path, name, schedule, checkpoint, frozen
):
    toy, devices = toys.TOYS[name], TABLES[schedule]
    table = toys.SCHEDULES.get(schedule, lambda n, m: order.build(schedule, 2, m, 2).to_csv())(2, 4)
    toys.write(tmp_path, toy, 4, schedule, checkpoint, devices, table)
    batches = (10, 8) if name == "normed" else (10, 3)
    assert alike(two.run(closure_jobs.steps, tmp_path, name, 4, batches, frozen))


@pytest.mark.parametrize("name", ["noisy", "tied", "whole"])
@pytest.mark.parametrize("devices", [(0, 1, 0), (1, 0, 0)])
def test_the_end_and_the_beginning_may_be_on_any_rank(two, tmp_path, name, devices):
    toy = toys.TOYS[name]
    toys.write(tmp_path, toy, 3, devices=devices)
    frozen = "" if toy.integer else "after"
    assert alike(two.run(closure_jobs.steps, tmp_path, name, 3, (10, 2, 4), frozen))


PLACE = " (in the closure of micro-batch {}, closure_jobs.py, line "


@pytest.mark.parametrize(
    ("where", "error", "place"),
    [
        ("before 0", "KeyError: 'mine'", PLACE.format(0)),
        ("before 2", "KeyError: 'mine'", PLACE.format(2)),
        ("after 1", "KeyError: 'mine'", PLACE.format(1)),
        (
            "call 0",
            "InputError: input 'x' must have shape [batch, 6], found [3, 5]",
            PLACE.format(0),
        ),
        ("stage", "StageError: stage 2 failed in 2F2: ValueError: a bad row", ""),
    ],
)
def test_what_fails_on_one_rank_is_named_by_all(two, tmp_path, where, error, place):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    (heard, again), (own, _) = two.run(closure_jobs.failing, tmp_path, where, 1)
    assert own == error
    text = error if error.startswith("KeyError") else error.partition(": ")[2]
    assert heard.startswith(f"StageError: rank 1 failed: {text}{place}")
    assert "start all processes again" in again


def test_without_gradients_all_ranks_get_the_outputs(two, tmp_path):
    toys.write(tmp_path, toys.NOISY, 4, devices=(0, 1, 0))
    assert two.run(closure_jobs.without_gradients, tmp_path) == EQUAL


def test_a_closure_may_write_into_what_it_gets(two, tmp_path):
    toys.write(tmp_path, toys.EARLY, 4)
    assert two.run(closure_jobs.in_place, tmp_path) == EQUAL


def test_closures_that_differ_are_refused_alike_and_the_next_goes_on(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    errors, others = two.run(closure_jobs.differing, tmp_path)
    assert errors == others
    before, after, rows, gradient, grad, mode = errors
    assert "rank 1's closure gave the pipeline another x in micro-batch 0 than rank 0's" in before
    assert "rank 1's closure gave the pipeline another gradient of output y in micro-" in after
    assert "rank 1 was called with 4 closures, rank 0 with 3 closures" in rows
    assert "1 of them with a gradient; rank 1" in gradient
    assert "rank 1 was called with 4 closures without gradients, rank 0 with 4 closures" in grad
    assert "rank 1 is in eval mode, rank 0 in training mode" in mode


@pytest.mark.parametrize("autocast", [True, False])
def test_what_overflows_on_one_rank_overflows_on_all(two, tmp_path, autocast):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 0, 1))
    assert two.run(closure_jobs.scaled, tmp_path, autocast) == [[(2.0, False), (4.0, True)]] * 2


def test_a_model_runs_on_every_rank_around_a_part_of_it(two, tmp_path):
    write_part(tmp_path, 4)
    assert two.run(closure_jobs.spliced, tmp_path, 4) == EQUAL


def test_a_checkpoint_is_of_the_pipeline_and_not_of_the_model_around_it(two, tmp_path):
    write_part(tmp_path, 4)
    saved, loaded = two.run(closure_jobs.spliced_checkpoint, tmp_path, tmp_path / "last")[0]
    assert "call checkpoint.save(path, pipe, optimizer) with the pipeline, which has those" in saved
    assert "call checkpoint.load(path, pipe, optimizer) with the pipeline, which has" in loaded


def test_a_norm_over_stages_and_what_stands_around_them(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    assert two.run(closure_jobs.clipped, tmp_path) == EQUAL


def test_a_tie_across_the_edge_of_a_part_is_refused(two, tmp_path):
    write_part(tmp_path, 4)
    plan = tmp_path / "plan.json"
    manifest = Manifest.from_json(plan.read_text())
    state = [
        replace(s, alias_of="body.2.weight") if s.name == "head.weight" else s
        for s in manifest.state
    ]
    plan.write_text(replace(manifest, state=tuple(state)).to_json())
    error, other = two.run(jobs.refused, tmp_path)
    assert error == other
    assert "head.weight, outside of the pipeline, is tied to body.2.weight in it" in error


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("settings", [{}, {"fully_shard": True}], ids=["whole", "sharded"])
@pytest.mark.parametrize("rows", [(5, 5), (8, 3)], ids=str)
def test_closures_around_replicas_are_the_program_on_all_their_rows(
    four, tmp_path, halved, settings, rows
):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    if halved:
        table = tmp_path / "schedule.csv"
        table.write_text(re.sub(r"(\d)B(\d)", r"\1I\2,\1W\2", table.read_text()))
    assert four.run(closure_jobs.replicated, tmp_path, rows, settings) == EQUAL * 2


@pytest.mark.parametrize("rows", [(5, 5), (8, 3)], ids=str)
def test_a_model_around_replicas_of_a_part_is_the_plain_one_on_all_their_rows(four, tmp_path, rows):
    write_part(tmp_path, 4)
    assert four.run(closure_jobs.replicated_splice, tmp_path, rows) == EQUAL * 2


@pytest.mark.parametrize("settings", [{}, {"dp": 2}, {"dp": 2, "fully_shard": True}], ids=str)
def test_what_several_ranks_hold_is_the_firsts_where_each_loads_other_weights(
    two, four, tmp_path, settings
):
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 1, 1))
    found = (four if settings else two).run(closure_jobs.differing_weights, tmp_path, settings)
    for rank, whose in enumerate(found):
        replica = rank // 2 if "fully_shard" in settings else 0
        first, second = {str(2 * replica)}, {str(2 * replica + 1)}
        mid = {"mid.weight": second, "mid.bias": second} if rank % 2 else {}
        assert whose == {"embed.weight": first, "head.weight": first, **mid}


def test_closures_around_replicas_name_what_is_around_and_weigh_late(four, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    for unnamed, early in four.run(closure_jobs.replicated_wrongly, tmp_path):
        assert "closures around 2 replicas of a pipeline: name the parameters around it" in unnamed
        assert "read the runner's share before it called the pipeline" in early
