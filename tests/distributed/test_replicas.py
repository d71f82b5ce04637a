"""Replicas of a pipeline give what one model gives on all their rows."""

import jobs
import pytest
import torch
import toys
from flat import compile_analytic
from torch import nn
from torch.nn import functional

from fxpipe import checkpoint
from fxpipe.passes import order
from fxpipe.runtime import load


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
    assert four.run(jobs.replicated, tmp_path, name, 3, batches) == ["equal"] * 4


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "bfs"])
def test_replicas_under_schedules_with_several_stages_a_rank(four, tmp_path, schedule):
    table = order.build(schedule, 2, 4, 2).to_csv()
    devices = (0, 1, 1, 0) if schedule == "zb-v" else (0, 1, 0, 1)
    toys.write(tmp_path, toys.SKIPS, 4, devices=devices, table=table)
    batches = [(8, 8), (10, 1)]
    assert four.run(jobs.replicated, tmp_path, "skips", 4, batches) == ["equal"] * 4


def test_replicas_of_one_rank(two, tmp_path):
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 0, 0))
    assert two.run(jobs.replicated, tmp_path, "tied", 3, [(7, 3), (1, 4)]) == ["equal"] * 2


@pytest.mark.parametrize("devices", [(0, 0, 0), (0, 1, 0)])
def test_gradients_go_on_where_replicas_have_other_hooks_and_tensors(four, tmp_path, devices):
    toys.write(tmp_path, toys.TIED, 2, devices=devices)
    dp = 4 // len({*devices})
    hooked = 4 // dp
    assert four.run(jobs.gradients_go_on, tmp_path, dp) == [3] * hooked + [0] * (4 - hooked)


@pytest.mark.parametrize(("name", "devices"), [("chain", (0, 1, 1)), ("tied", (0, 1, 0))])
def test_gradients_go_on_where_a_step_begins_again(four, tmp_path, name, devices):
    toys.write(tmp_path, toys.TOYS[name], 4, devices=devices)
    first, _, third, _ = four.run(jobs.mistaken, tmp_path, name, 4, 2)
    assert first == third
    assert max(first) > 4


def test_steps_that_add_up_hold_one_gradient(two, tmp_path):
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))
    model, x = nn.Sequential(*layers), torch.randn(8, 64)
    package = compile_analytic(model, x, functional.mse_loss, devices=1)
    package.write(tmp_path / "out", weights=True)
    job = (jobs.held, tmp_path / "out", x, x, functional.mse_loss, True, 2)
    for predicted, measured in two.run(*job):
        assert measured <= predicted


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_pipelines_of_one_process_in_data_parallel(two, tmp_path, checkpoint):
    toys.write(tmp_path, toys.NORMED, 4, checkpoint=checkpoint)
    assert two.run(jobs.in_data_parallel, tmp_path) == ["equal"] * 2


def test_replicas_train_alike_and_their_checkpoint_is_for_one_process(four, tmp_path):
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 1, 0))
    path = tmp_path / "last"
    assert four.run(jobs.replicated_training, tmp_path, path) == ["equal"] * 4
    alone = tmp_path / "alone"
    alone.mkdir()
    toys.write(alone, toys.TIED, 2)
    pipe = load(alone)
    optimizer = torch.optim.AdamW(pipe.parameters(), 1.0)
    assert checkpoint.load(path, pipe, optimizer) == 0
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_replicas_begin_with_the_weights_of_the_first(four, tmp_path):
    toys.write(tmp_path, toys.CHAIN, devices=(0, 1, 1))
    first, second, third, fourth = four.run(jobs.replicas_start_equal, tmp_path)
    assert all(map(torch.equal, first, third))
    assert all(map(torch.equal, second, fourth))


def test_a_loss_that_trains_something_is_refused(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, devices=(0, 0, 0))
    for error in two.run(jobs.loss_that_trains, tmp_path):
        assert "it trains something of shape [3] besides the pipeline, whose gradients" in error


def test_processes_that_are_no_whole_replicas_are_refused(four, tmp_path):
    toys.write(tmp_path, toys.CHAIN, devices=(0, 1, 1))
    errors = four.run(jobs.refused_options, tmp_path, "dp", [3, 3, 3, 3])
    assert set(errors) == {errors[0]}
    assert "dp=3: 4 processes can't be cut" in errors[0]
    (error, *_) = four.run(jobs.refused_options, tmp_path, "dp", [2, 2, 1, 2])
    assert "rank 0 was given dp=2, rank 2 dp=1" in error
    (error, *_) = four.run(jobs.refused_options, tmp_path, "dp", [4, 4, 4, 4])
    assert "compiled for 2 devices, 1 processes run it in each of dp=4 replicas" in error
    assert "--nproc-per-node 8" in error
