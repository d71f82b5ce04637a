"""torch.distributed.pipelining computes with our stages and tables what the plain model does."""

import re
import shutil

import pytest
import torch
import torch_jobs
import toys
from safetensors.torch import save_file

import fxpipe
from fxpipe.errors import InputError
from fxpipe.passes import order

_NEWER = r"install torch (\S+) or newer"
EQUAL = ["equal", "equal"]
# Whole backwards and halves, on ranks of two stages.
BY_HAND = (
    "0F0,0F1,3F0,3B0,3F1,0F2,3I1,0B0,0F3,3W1,3F2,3B2,0I1,3F3,3B3,0W1,0B2,0B3\n"
    "1F0,2F0,1F1,2F1,2B0,1B0,2I1,1F2,1B1,2W1,2F2,1F3,2F3,2B2,1B2,2B3,1B3\n"
)


def run(ranks, job, *args):
    """What each rank's job gives; skips the test where a package is refused for torch's age."""
    try:
        return ranks.run(job, *args)
    except AssertionError as error:
        newer = max(re.findall(_NEWER, str(error)), default="0")
        if torch.__version__ < newer:
            pytest.skip(f"this is torch {torch.__version__}: {newer} or newer runs it")
        raise


@pytest.mark.parametrize(
    ("name", "schedule", "checkpoint"),
    [
        ("normed", "gpipe", "never"),
        ("normed", "1f1b", "segment"),
        ("normed", "zb-h1", "always"),
        ("early", "gpipe", "always"),
        ("early", "1f1b", "never"),
        ("early", "zb-h1", "segment"),
    ],
)
def test_a_stage_on_each_rank(two, tmp_path, name, schedule, checkpoint):
    toy = toys.TOYS[name]
    table = order.build(schedule, 2, 4, 1).to_csv()
    toys.write(tmp_path, toy, 4, checkpoint=checkpoint, table=table)
    assert run(two, torch_jobs.steps, tmp_path, toy, 8, 4) == EQUAL


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "bfs", BY_HAND])
def test_skips_go_from_stage_to_stage(two, tmp_path, schedule):
    table = schedule
    if schedule is not BY_HAND:
        table = order.build(schedule, 2, 4, 2).to_csv()
    devices = (0, 1, 1, 0) if schedule in ("zb-v", BY_HAND) else (0, 1, 0, 1)
    toys.write(tmp_path, toys.SKIPS, 4, devices=devices, table=table)
    assert run(two, torch_jobs.steps, tmp_path, toys.SKIPS, 8, 4) == EQUAL


@pytest.mark.parametrize("name", ["whole", "tied"])
def test_bools_integers_and_a_weight_tied_on_one_rank(two, tmp_path, name):
    toy = toys.TOYS[name]
    toys.write(tmp_path, toy, 4, devices=(0, 1, 0))
    assert run(two, torch_jobs.steps, tmp_path, toy, 12, 4) == EQUAL


def test_views_in_place_ops_and_expanded_gradients(two, tmp_path):
    table = "0F0,2F0,0F1,2I0,2F1,2W0,2I1,2W1,0I0,0W0,0B1\n1F0,1F1,1I0,1I1,1W0,1W1\n"
    toys.write(tmp_path, torch_jobs.VIEWS, 2, devices=(0, 1, 0), table=table)
    assert run(two, torch_jobs.steps, tmp_path, torch_jobs.VIEWS, 8, 2) == EQUAL


def test_losses_of_some_outputs(two, tmp_path):
    toys.write(tmp_path, toys.EARLY, 4, table=order.build("zb-h1", 2, 4, 1).to_csv())
    assert run(two, torch_jobs.other_losses, tmp_path, 4) == EQUAL


def test_stages_under_a_schedule_of_torch(two, tmp_path):
    toys.write(tmp_path, toys.SKIPS, 4, devices=(0, 1, 0, 1))
    assert two.run(torch_jobs.stages_alone, tmp_path, 4) == EQUAL


def test_optimizers_train_within_a_group_of_ranks(four, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 2, devices=(0, 1, 0))
    found = four.run(torch_jobs.trained, tmp_path, (1, 3))
    assert found == [
        "elsewhere",
        "equal",
        "elsewhere",
        "equal",
    ]


def test_calls_that_do_not_fit_say_what_does(two, tmp_path):
    toys.write(tmp_path, toys.TIED, 4, devices=(0, 1, 0))
    (rows, inputs, shape, name, scale), _ = two.run(torch_jobs.misused, tmp_path)
    assert "batches of 8 rows in 4 micro-batches" in rows
    assert "found 10 rows" in rows
    assert "2 positional inputs were given" in inputs
    assert "inputs of shapes [[2, 5]] a micro-batch, found [[10, 5]]" in shape
    assert "takes its inputs by position, not as ids: ids" in name
    assert "several stages of this rank add to the gradient of head.weight" in scale


def test_a_target_of_no_tensor_is_refused_on_each_rank_and_none_where_the_loss_is(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 0, 1))
    first, last = two.run(torch_jobs.targets, tmp_path)
    rule = "the rank of the last stage gives a tensor, which torch cuts along its first dimension"
    assert first[:2] == ["nothing", "nothing"]
    assert all(rule in error for error in [*first[2:], *last])


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, "a batch of 10 rows makes no 4 equal micro-batches"),
        ({"length": 10}, "the package has no size length: it has batch"),
        (
            {"batch": 8, "dtype": torch.int64},
            "dtype=torch.int64: floats between stages",
        ),
        ({"device": "cpu*2"}, "each process runs on one device, 2 were given"),
    ],
)
def test_settings_that_do_not_fit_are_refused_alike(two, tmp_path, settings, error):
    toys.write(tmp_path, toys.SKIPS, 4, devices=(0, 1, 0, 1))
    found, other = two.run(torch_jobs.refused, tmp_path, settings)
    assert found == other
    assert error in found


def test_packages_that_differ_are_refused(two, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, m in zip(folders, (2, 4), strict=True):
        folder.mkdir()
        toys.write(folder, toys.EARLY, m)
    found, other = two.run(torch_jobs.refused_folder, folders)
    assert found == other
    assert "the ranks of this pipeline differ" in found


def test_weights_that_one_rank_can_not_read_are_refused_alike(two, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        toys.write(folder, toys.EARLY, 2)
        (folder / "weights").mkdir()
        save_file(toys.EARLY.model().state_dict(), folder / "weights" / "all.safetensors")
    (folders[1] / "weights" / "all.safetensors").write_bytes(b"junk")
    found, other = two.run(torch_jobs.refused_folder, folders)
    assert found == other
    assert "weights were loaded on no rank:\nrank 1: " in found
    shutil.rmtree(folders[1] / "weights")
    found, other = two.run(torch_jobs.refused_folder, folders)
    assert found == other
    assert "weights: rank 0 has True, rank 1 has False" in found


def test_what_theirs_gets_wrong_is_refused_with_all_reasons(two, tmp_path):
    toys.write(tmp_path, toys.NOISY, 4, devices=(0, 1, 1))
    found, other = two.run(torch_jobs.refused, tmp_path, {})
    assert found == other
    assert "can't run this package:\n  random numbers in stages 0, 1, 2: " in found
    assert "fxpipe.load(..., distributed=True)" in found


def test_a_part_is_not_saved_as_if_it_were_all(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 2, devices=(0, 1, 0))
    errors = two.run(torch_jobs.saved, tmp_path)
    assert all("holds a part of the model's weights" in error for error in errors)
    assert not (tmp_path / "last").exists()


def test_floats_of_another_dtype_than_told(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 2, devices=(0, 1, 0))
    (untold, told), _ = two.run(torch_jobs.other_dtypes, tmp_path)
    assert "stage 0 gives h torch.float32[5, 7]" in untold
    assert "its neighbours were told of h torch.float64[5, 7]" in untold
    assert told == "nothing"


def test_a_gradient_that_was_none_when_compiled(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 2, devices=(0, 1, 1))
    plan = (tmp_path / "plan.json").read_text()
    frozen = plan.partition('"state"')[0].replace('"requires_grad": true', '"requires_grad": false')
    (tmp_path / "plan.json").write_text(frozen + plan[len(plan.partition('"state"')[0]) :])
    found, _ = run(two, torch_jobs.thawed, tmp_path)
    assert "stage 0 gives h torch.float64[5, 7] with a gradient, which it had not" in found


def test_without_a_group_of_processes_the_error_says_how_to_start(tmp_path):
    with pytest.raises(InputError, match="init_process_group"):
        fxpipe.to_torch_pipelining(toys.write(tmp_path, toys.CHAIN))
