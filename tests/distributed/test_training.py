"""Training on ranks is training in one process: optimizers, norms, scalers, dtypes, losses."""

import jobs
import pytest
import torch
import toys
from torch import nn
from torch.nn import functional

import fxpipe

EQUAL = ["equal", "equal"]


@pytest.mark.parametrize(
    ("name", "devices"), [("tied", (0, 1, 1)), ("tied", (1, 0, 0)), ("skips", (0, 1, 0, 1))]
)
def test_an_optimizer_on_each_rank_and_a_norm_over_all(two, tmp_path, name, devices):
    toys.write(tmp_path, toys.TOYS[name], 3, devices=devices)
    assert two.run(jobs.training, tmp_path, name, 3) == EQUAL


def test_a_tie_among_four_ranks_of_which_one_has_no_stage(four, tmp_path):
    toys.write(tmp_path, toys.TIED, 4, devices=(3, 0, 1))
    assert four.run(jobs.training, tmp_path, "tied", 4) == ["equal"] * 4


def test_a_second_pipeline_keeps_an_average_of_the_weights(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 0, 1))
    assert two.run(jobs.averaged, tmp_path) == EQUAL


def test_what_overflows_on_one_rank_overflows_on_all(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 0, 1))
    trained, frozen = [(2.0, False), (4.0, True)], [(2.0, False), (4.0, False)]
    assert two.run(jobs.scaled, tmp_path, ()) == [trained, trained]
    assert two.run(jobs.scaled, tmp_path, (0,)) == [frozen, trained]


@pytest.mark.parametrize("name", ["early", "skips"])
def test_inputs_get_their_gradients_wherever_they_were_given(two, tmp_path, name):
    devices = (0, 1, 0, 1)[: len(toys.TOYS[name].parts)]
    toys.write(tmp_path, toys.TOYS[name], 3, devices=devices)
    assert two.run(jobs.input_gradients, tmp_path, name, 3) == EQUAL


def test_autocast_other_dtypes_and_frozen_parameters(two, tmp_path):
    toys.write(tmp_path, toys.SKIPS, 3, devices=(0, 1, 0, 1))
    assert two.run(jobs.dtypes, tmp_path) == EQUAL


def test_losses_of_other_outputs_by_turns(two, tmp_path):
    toys.write(tmp_path, toys.EARLY, 1)
    assert two.run(jobs.other_losses, tmp_path) == EQUAL


def test_outputs_on_all_ranks(two, tmp_path):
    toys.write(tmp_path, toys.EARLY, 4)
    assert two.run(jobs.outputs_on_all, tmp_path) == EQUAL


def test_a_rank_shows_its_own_step_and_memory(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    assert two.run(jobs.looked_at, tmp_path, tmp_path) == [([(0,)], 1), ([(1,)], 1)]


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "auto"])
def test_ranks_that_ask_ahead_hold_no_more_than_was_planned(two, tmp_path, schedule, rows):
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
    model, x = nn.Sequential(*layers), torch.randn(8, rows, 64)
    package = fxpipe.compile(
        model,
        (x,),
        devices="cpu*2",
        microbatches=8,
        schedule=schedule,
        profile="analytic:cpu",
        topology="2:eth10",
        target=x,
        loss_fn=functional.mse_loss,
        time_limit_s=1.0,
    )
    assert min(package.manifest.estimate.ahead_bytes) > 0
    package.write(tmp_path / "out", weights=True)
    for predicted, measured in two.run(jobs.held, tmp_path / "out", x):
        assert measured <= predicted <= 1.1 * measured
