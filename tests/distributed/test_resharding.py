"""A run goes on under another plan: other stages on other ranks, another schedule, one process."""

import jobs
import pytest
import toys

from fxpipe import checkpoint
from fxpipe.runtime import load


@pytest.mark.parametrize(
    ("name", "devices"), [("tied", (1, 0, 0)), ("skips", (0, 1, 1, 0)), ("chain", (0, 0, 1))]
)
def test_saved_under_one_plan_resumed_under_others(two, tmp_path, name, devices):
    toy, n = toys.TOYS[name], len(devices)
    plans = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    for plan, lanes in zip(plans, ((0, 1, 0, 1)[:n], devices, tuple(range(n))), strict=True):
        plan.mkdir()
        toys.write(plan, toy, 3, devices=lanes)
    path = tmp_path / "last"
    assert two.run(jobs.saved, plans[0], name, 3, path) == ["saved"] * 2
    assert two.run(jobs.resumed, plans[1], name, 3, path) == ["equal"] * 2
    pipe = load(plans[2])
    optimizer = jobs.adam(toy, pipe, 1.0)
    assert checkpoint.load(path, pipe, optimizer) == {"step": 2, "rank": 0}
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.025]
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_a_checkpoint_needs_a_folder_that_all_share_and_that_is_one(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 3, devices=(0, 0, 1))
    paths = [tmp_path / "one" / "last", tmp_path / "two" / "last"]
    for path in paths:
        path.parent.mkdir()
    errors, others = two.run(jobs.scattered, tmp_path, paths)
    assert [error.replace("/two/", "/one/") for error in others] == errors
    apart, foreign = errors
    assert "last can't be written: __1_0.distcp is not where rank 0 looks" in apart
    assert "no whole checkpoint: move it, or save elsewhere" in foreign
    assert not checkpoint.exists(paths[0])


def test_what_does_not_fit_one_rank_is_refused_by_all_and_training_goes_on(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 3, devices=(0, 0, 1))
    found, others = two.run(jobs.refused_checkpoints, tmp_path, tmp_path / "last")
    assert found == others
    saving, loading = found
    assert saving.startswith("WeightsError: ")
    assert "last can't be written: the optimizer trains a parameter of shape [2]" in saving
    assert loading.startswith("WeightsError: ")
    assert "last can't be loaded: it is no whole checkpoint" in loading


def test_an_optimizer_that_wraps_another_is_refused_by_all_and_writes_nothing(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 2, devices=(0, 0, 0))
    found, others = two.run(jobs.refused_zero, tmp_path, tmp_path / "last")
    assert found == others
    saving, loading = found
    says = "ZeroRedundancyOptimizer keeps states in an optimizer within it, AdamW"
    assert f"last can't be written: {says}" in saving
    assert f"plain can't be loaded: {says}" in loading
    assert not (tmp_path / "last").exists()


def test_one_process_saves_for_two(two, tmp_path):
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 1, 1))
    _, pipe = toys.both(tmp_path, toys.TIED, m=3, devices=(0, 1, 1))
    optimizer = jobs.adam(toys.TIED, pipe, 0.05)
    for _ in range(2):
        optimizer.zero_grad()
        pipe.step(*toys.TIED.inputs(), loss_fn=toys.mean_loss)
        optimizer.step()
    path = tmp_path / "last"
    checkpoint.save(path, pipe, optimizer, {"step": 2, "rank": 0})
    assert two.run(jobs.resumed, tmp_path, "tied", 3, path) == ["equal"] * 2
