"""Deferred batch norms see the mini-batch: running statistics as the plain model's, once a step."""

import copy

import pytest
import torch
import toys
from torch import nn

import fxpipe
from fxpipe.errors import PackageError, StageError
from fxpipe.runtime.batchnorm import DeferredBatchNorm, defer

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def halves(norm, x, m):
    return torch.cat([norm(piece) for piece in x.chunk(m)])


def assert_same_statistics(one, other):
    for name in STATISTICS:
        torch.testing.assert_close(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("rows", [12, 10])
def test_running_statistics_are_those_of_the_whole_batch(momentum, rows):
    plain = nn.BatchNorm2d(3, momentum=momentum).double()
    norm = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(plain), chunks=4)
    for _ in range(3):
        x = torch.randn(rows, 3, 2, 2, dtype=torch.float64)
        plain(x)
        norm.begin(len(x.chunk(4)))
        halves(norm, x, 4)
        assert_same_statistics(plain, norm)


def test_a_large_mean_costs_no_digits():
    plain = nn.BatchNorm1d(2)
    norm = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(plain), chunks=4)
    x = torch.randn(64, 2) + 1e4
    plain(x)
    halves(norm, x, 4)
    torch.testing.assert_close(norm.running_var, plain.running_var, rtol=1e-3, atol=0)


def test_each_micro_batch_is_normalized_by_its_own_statistics_and_eval_by_the_running_ones():
    plain = nn.BatchNorm1d(2).double()
    norm = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(plain), chunks=2)
    x = torch.randn(8, 2, dtype=torch.float64)
    reference = copy.deepcopy(plain)
    torch.testing.assert_close(halves(norm, x, 2), halves(reference, x, 2))
    plain(x)
    torch.testing.assert_close(norm.eval()(x), plain.eval()(x))


def test_conversion_shares_parameters_buffers_and_modules():
    norm = nn.BatchNorm1d(2)
    plain = nn.Sequential(norm, nn.ReLU(), nn.Sequential(norm), nn.BatchNorm1d(2).eval())
    frozen = plain[3]
    model = DeferredBatchNorm.convert_deferred_batch_norm(plain, chunks=2)
    assert model[0] is model[2][0]
    assert model[0].weight is norm.weight
    assert model[0].running_mean is norm.running_mean
    assert not model[3].training
    assert model[3].running_var is frozen.running_var


def test_batch_norms_without_running_statistics_stay_as_they_are():
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    assert DeferredBatchNorm.convert_deferred_batch_norm(norm, chunks=2) is norm


def test_a_batch_norm_with_a_forward_of_its_own_is_refused():
    class Activated(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x).relu()

    with pytest.raises(ValueError, match="Activated has a forward of its own"):
        DeferredBatchNorm.convert_deferred_batch_norm(nn.Sequential(Activated(2)), chunks=2)


def test_statistics_that_the_model_updates_itself_are_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(2))

    with pytest.raises(ValueError, match=r"'0.running_mean' is updated by code of the model's own"):
        defer(nn.Sequential(Own()), ["0.running_mean"], 2)


def expected_norms(toy, model, x, m):
    """Plain batch norms after one batch of what comes to each of them, micro-batch by micro-batch.

    What comes to a second batch norm is normalized by each micro-batch's statistics, so the whole
    model's would be others.
    """
    norms = {k: v for k, v in copy.deepcopy(model).named_modules() if isinstance(v, nn.BatchNorm1d)}
    seen = {name: [] for name in norms}
    watched = copy.deepcopy(model)
    for name in norms:
        watched.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0].detach())
        )
    for inputs in toys.pieces(toy, (x,), m):
        watched(*inputs)
    for name, norm in norms.items():
        norm(torch.cat(seen[name]))
    return norms


@pytest.mark.parametrize("checkpoint", toys.MODES)
@pytest.mark.parametrize("schedule", [*toys.SCHEDULES, "pipe(x)"])
def test_a_package_updates_running_statistics_once_a_step(tmp_path, schedule, checkpoint):
    table = "gpipe" if schedule == "pipe(x)" else schedule
    toys.write(tmp_path, toys.NORMED, 4, table, checkpoint)
    pipe = fxpipe.load(tmp_path, "cpu*2", deferred_batch_norm=True).double()
    model = toys.NORMED.model().double()
    for batch in (toys.BATCH, 12):
        model.load_state_dict(pipe.state_dict())
        (x,) = toys.NORMED.inputs(batch)
        if schedule == "pipe(x)":
            toys.mean_loss(pipe(x)).backward()
        else:
            pipe.step(x, loss_fn=toys.mean_loss)
        for name, norm in expected_norms(toys.NORMED, model, x, 4).items():
            assert_same_statistics(pipe.get_submodule(name), norm)
    assert set(pipe.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("checkpoint", ["except_last", "segment"])
def test_compiled_stages_count_as_others_do(tmp_path, monkeypatch, checkpoint):
    compiled = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, options: compiled(self, backend="aot_eager")
    )
    toys.write(tmp_path, toys.NORMED, 4, "1f1b", checkpoint)
    pipe = fxpipe.load(tmp_path, "cpu*2", compile=True, deferred_batch_norm=True).double()
    model = toys.NORMED.model().double()
    for batch in (8, 8, 12):
        model.load_state_dict(pipe.state_dict())
        (x,) = toys.NORMED.inputs(batch)
        pipe.step(x, loss_fn=toys.mean_loss)
        for name, norm in expected_norms(toys.NORMED, model, x, 4).items():
            assert_same_statistics(pipe.get_submodule(name), norm)


def test_what_came_of_a_mini_batch_that_failed_is_dropped(tmp_path):
    toys.write(tmp_path, toys.NORMED, 4, "1f1b")
    pipe = fxpipe.load(tmp_path, "cpu*2", deferred_batch_norm=True).double()
    model = toys.NORMED.model().double()
    model.load_state_dict(pipe.state_dict())
    (x,) = toys.NORMED.inputs()

    def broken(output, target):
        raise ArithmeticError

    with pytest.raises(StageError):
        pipe.step(x, loss_fn=broken)
    pipe.step(x, loss_fn=toys.mean_loss)
    expected = expected_norms(toys.NORMED, model, x, 4)
    # The first stage may have seen all of the batch that failed: then it has counted it.
    assert_same_statistics(pipe.get_submodule("bn2"), expected["bn2"])


def test_load_refuses_a_package_whose_statistics_can_not_be_deferred(tmp_path):
    toys.write(tmp_path, toys.NORMED)
    file = tmp_path / "stage_1.py"
    text = file.read_text()
    own = "class Own(nn.BatchNorm1d):\n    def forward(self, x):\n        return super().forward(x)"
    text = text.replace("class Stage1", own + "\n\n\nclass Stage1")
    file.write_text(text.replace("self.bn2 = nn.BatchNorm1d", "self.bn2 = Own"))
    with pytest.raises(PackageError, match=r"stage_1\.py: Own has a forward of its own"):
        fxpipe.load(tmp_path, deferred_batch_norm=True)
