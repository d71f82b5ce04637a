"""Training on ranks is training in one process: optimizers, norms, scalers, dtypes, losses."""

import jobs
import pytest
import torch
import toys
from flat import compile_analytic
from torch import nn
from torch.nn import functional

import fxpipe
from fxpipe.errors import InputError
from fxpipe.runtime.package import read
from fxpipe.show import measured as traces

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


def test_two_stages_of_a_rank_have_one_leaf_of_a_weight(two, tmp_path):
    toys.write(tmp_path, toys.SHARES, 4, devices=(1, 0, 0))
    assert two.run(jobs.shared_by_two_stages, tmp_path) == EQUAL


def test_gradients_of_a_tie_add_up_over_steps_and_a_hook_sees_one_steps(four, tmp_path):
    toys.write(tmp_path, toys.SHARES, 4, devices=(3, 0, 1))
    found = four.run(jobs.hook_on_a_tie, tmp_path)
    assert found == ["equal, seen 3 times", *["equal, seen 0 times"] * 3]


def test_a_second_pipeline_keeps_an_average_of_the_weights(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 0, 1))
    assert two.run(jobs.averaged, tmp_path) == EQUAL


def test_what_overflows_on_one_rank_overflows_on_all(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 0, 1))
    trained, frozen = [(2.0, False), (4.0, True)], [(2.0, False), (4.0, False)]
    assert two.run(jobs.scaled, tmp_path, ()) == [trained, trained]
    assert two.run(jobs.scaled, tmp_path, (0,)) == [frozen, trained]


def test_what_overflows_of_one_optimizer_overflows_of_all(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 0, 1))
    assert two.run(jobs.scaled_by_kind, tmp_path) == [[False, False], [False, False]]


@pytest.mark.parametrize("tied", [False, True])
def test_sparse_gradients_are_scaled_and_added_up_over_ranks(two, tmp_path, tied):
    words, head = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 10, bias=False)
    if tied:
        head.weight = words.weight
    layers = (nn.Linear(6, 6) for _ in range(4))
    model, x = nn.Sequential(words, *layers, head).double(), torch.arange(8)
    package = fxpipe.compile(model, (x,), devices=2, microbatches=4, profile="analytic:cpu")
    package.write(tmp_path / "out", weights=True)
    assert two.run(jobs.sparse, tmp_path / "out", x) == EQUAL


class Viewed(nn.Module):
    """The length comes first in memory where it is cut, and `view` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x.transpose(0, 1).contiguous()).tanh().transpose(0, 1)
        x = x.transpose(0, 1)
        length, batch, width = x.shape
        return self.after(x.view(length * batch, width)).view(length, batch, width).transpose(0, 1)


class Dropped(nn.Module):
    """Random numbers are drawn in the order in which a value lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.after(functional.dropout(self.before(x), 0.5)), 0.5)


def test_values_lie_as_in_one_process_however_the_first_ones_did(two, tmp_path):
    images = torch.randn(8, 3, 6, 7)
    as_channels = images.to(memory_format=torch.channels_last)
    rows, few = torch.randn(8, 5, 6), torch.randn(4, 5, 6)
    for model, batches in ((Viewed(), [few, rows]), (Dropped(), [images, as_channels, images])):
        package = fxpipe.compile(
            model,
            batches[-1:],
            devices=2,
            microbatches=4,
            schedule="gpipe",
            profile="analytic:cpu",
        )
        folder = tmp_path / type(model).__name__
        package.write(folder, weights=True)
        assert two.run(jobs.same_losses, folder, batches) == [[True] * len(batches)] * 2


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


def test_traces_of_all_ranks_are_one_step(two, tmp_path):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(8, 8)
    compile_analytic(model, x, functional.mse_loss, devices=2).write(tmp_path / "out")
    two.run(jobs.traced, tmp_path / "out", x)
    plan = read(tmp_path / "out")
    steps = [[tmp_path / f"out/{k} of {rank}.json" for rank in (0, 1)] for k in (0, 1)]
    for files in steps:
        seen = traces.measured(plan, files)
        begins = {str(action): event.start_ms for action, event in seen.actions}
        assert len(begins) == 16
        # One clock: what another rank makes is there before it is used.
        assert all(begins[f"0F{i}"] < begins[f"1F{i}"] for i in range(4))
        assert all(begins[f"1B{i}"] < begins[f"0B{i}"] for i in range(4))
        assert [traces.measured(plan, [file]).known for file in files] == [(0,), (1,)]
    with pytest.raises(InputError, match=r"has step 1 of replica 0 .* has step 2 of replica 0"):
        traces.measured(plan, [steps[0][0], steps[1][1]])


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "auto"])
def test_ranks_that_ask_ahead_hold_no_more_than_was_planned(two, tmp_path, schedule, rows):
    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(8))
    model, x = nn.Sequential(*layers), torch.randn(8, rows, 64)
    package = compile_analytic(
        model,
        x,
        functional.mse_loss,
        devices=2,
        microbatches=8,
        schedule=schedule,
        topology="2:eth10",
        time_limit_s=1.0,
    )
    assert min(package.manifest.estimate.ahead_bytes) > 0
    package.write(tmp_path / "out", weights=True)
    for predicted, measured in two.run(jobs.held, tmp_path / "out", x, x, functional.mse_loss):
        assert measured <= predicted <= 1.1 * measured


def test_steps_that_add_up_hold_one_gradient_of_a_tie(two, tmp_path):
    words, head = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
    head.weight = words.weight
    layers = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
    model, x = nn.Sequential(words, *layers, head), torch.arange(8)
    package = compile_analytic(model, x, functional.cross_entropy, devices=2)
    package.write(tmp_path / "out", weights=True)
    job = (jobs.held, tmp_path / "out", x, x, functional.cross_entropy, True)
    for predicted, measured in two.run(*job):
        assert measured <= predicted
