"""Replicas that share out their parameters give what one model gives on all their rows."""

import jobs
import pytest
import toys

from fxpipe.passes import order


@pytest.mark.parametrize(
    ("name", "devices", "schedule"),
    [
        ("chain", (0, 1, 1), "gpipe"),
        ("chain", (0, 0, 1), "split"),
        ("normed", (0, 1), "1f1b"),
        ("tied", (0, 1, 1), "split"),
        ("tied", (1, 0, 1), "gpipe"),
        ("noisy", (0, 1, 1), "1f1b"),
        ("early", (0, 1), "split"),
    ],
)
def test_two_replicas_of_two_ranks(four, tmp_path, name, devices, schedule):
    toy = toys.TOYS[name]
    toys.write(tmp_path, toy, 3, schedule, devices=devices[: len(toy.parts)])
    batches = [(9, 7), (8, 6)] if name == "normed" else [(6, 6), (10, 3), (2, 5)]
    assert four.run(jobs.replicated, tmp_path, name, 3, batches, True) == ["equal"] * 4


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "bfs"])
def test_replicas_under_schedules_with_several_stages_a_rank(four, tmp_path, schedule):
    table = order.build(schedule, 2, 4, 2).to_csv()
    devices = (0, 1, 1, 0) if schedule == "zb-v" else (0, 1, 0, 1)
    toys.write(tmp_path, toys.SKIPS, 4, devices=devices, table=table)
    batches = [(8, 8), (10, 1)]
    assert four.run(jobs.replicated, tmp_path, "skips", 4, batches, True) == ["equal"] * 4


def test_replicas_of_one_rank(two, tmp_path):
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 0, 0))
    assert two.run(jobs.replicated, tmp_path, "tied", 3, [(7, 3), (1, 4)], True) == ["equal"] * 2


@pytest.mark.parametrize("devices", [(0, 1, 0), (0, 0, 0)])
def test_a_checkpoint_of_shares_is_for_whole_replicas_and_back(four, two, tmp_path, devices):
    """Clipped by the norm over all, with a scaler, from a tie over ranks."""
    ranks = four if 1 in devices else two
    toys.write(tmp_path, toys.TIED, 3, devices=devices)
    path = tmp_path / "last"
    equal = ["equal"] * (2 * (1 + max(devices)))
    assert ranks.run(jobs.replicated_training, tmp_path, path, True) == equal
    for fully_shard in (True, False):
        assert ranks.run(jobs.replicated_resumed, tmp_path, path, fully_shard) == equal
    assert ranks.run(jobs.replicated_training, tmp_path, path, False) == equal
    assert ranks.run(jobs.replicated_resumed, tmp_path, path, True) == equal


@pytest.mark.parametrize("checkpoint", ["never", "always", "segment"])
def test_a_rank_holds_its_share_and_is_like_the_model_in_all_else(four, tmp_path, checkpoint):
    """Shares are rows; a parameter without any is on each replica."""
    toys.write(tmp_path, toys.SCALED, 2, "1f1b", checkpoint)
    found = four.run(jobs.shares, tmp_path, tmp_path / "weights")
    assert [numels for numels, _ in found] == [
        {"a.weight": 24, "a.bias": 4, "scale": 1, "idle": 2},
        {"bn.weight": 4, "bn.bias": 4, "b.weight": 16, "b.bias": 2},
        {"a.weight": 24, "a.bias": 4, "scale": 1, "idle": 1},
        {"bn.weight": 4, "bn.bias": 4, "b.weight": 8, "b.bias": 1},
    ]
    assert "can't change after the first call" in found[0][1]


def test_what_is_gathered_twice_in_a_step_gets_one_gradient(two, tmp_path):
    table = "0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1\n"
    toys.write(tmp_path, toys.SCALED, 2, "1f1b", devices=(0, 0), table=table)
    found, other = two.run(jobs.shares, tmp_path, tmp_path / "weights")
    assert found[0]["a.weight"] == other[0]["a.weight"] == 24


def test_a_hook_that_would_not_run_on_a_share_is_refused(four, tmp_path):
    """But a post-accumulate hook runs, on what no other rank of the replica holds."""
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 1, 1))
    found = four.run(jobs.hooks_on_shares, tmp_path)
    for errors, _ in found:
        assert errors == found[0][0]
        assert len(errors) == 4
        for error in errors.values():
            for line, rank in zip(error.splitlines(), (2, 3), strict=True):
                assert line.startswith(f"rank {rank}: embed.weight has a hook, which would not run")
    ran = {"mid.weight": [1, 1], "mid.bias": [1, 1]}
    assert [ran for _, ran in found] == [{}, ran, {}, ran]


def test_ranks_need_no_mesh_that_carries_what_is_on_the_cpu(two, tmp_path):
    """A caller's `init_process_group("nccl")` is for GPUs alone."""
    toys.write(tmp_path, toys.SCALED, 2, "1f1b", devices=(0, 0))
    assert two.run(jobs.carries_shares, tmp_path) == [True] * 2


def test_a_rank_shows_what_it_gathers_and_reduces(four, tmp_path):
    table = "0F0,0F1,1F0,1F1,2F0,2F1,3F0,3F1,3B0,3B1,2B0,2B1,1B0,1B1,0B0,0B1\n"
    toys.write(tmp_path, toys.SKIPS, 2, devices=(0, 0, 0, 0), table=table)
    for names, (whole, shares) in four.run(jobs.shares_looked_at, tmp_path, tmp_path):
        gathered = [f"gather {j}" for j in (0, 1, 2, 3, 2, 1, 0)]
        assert [name for name in names if "gather" in name] == gathered
        assert [name for name in names if "reduce" in name] == [f"reduce {j}" for j in (3, 2, 1, 0)]
        assert 0 < shares < whole
