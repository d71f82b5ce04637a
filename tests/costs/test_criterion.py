"""The loss is costed as a step takes it: the first micro-batch's, of what the model returns."""

import models
import pytest
import torch
from torch.nn import functional as F

import fxpipe
from fxpipe.capture import capture
from fxpipe.costs.criterion import Criterion, Loss
from fxpipe.costs.stopwatch import StopWatch
from fxpipe.errors import InputError, StageError
from fxpipe.passes.analytic import analytic

CPU = torch.device("cpu")
X = torch.randn(6, 6)


def criterion(loss_fn, target=None, model=None, m=4):
    captured = capture(model or models.Chain(), (X,), {})
    return captured, Criterion.of(captured, Loss(loss_fn, target), m)


def test_the_first_micro_batch_meets_its_own_piece_of_the_target():
    def loss_fn(output, target):
        assert target["of"].shape == output.shape == (2, 6)
        return F.mse_loss(output, target["of"])

    _, found = criterion(loss_fn, {"of": torch.arange(36.0).view(6, 6)})
    output = torch.randn(2, 6)
    (gradient,) = found.gradients([output])
    assert torch.allclose(gradient, 2 * (output - torch.arange(12.0).view(2, 6)) / 12)


def test_outputs_are_as_the_model_returns_them_and_those_that_are_not_used_have_no_gradient():
    def loss_fn(answer, target):
        assert isinstance(answer, models.Answer)
        assert all(hidden is None or hidden.requires_grad for hidden in answer.hidden)
        return answer.logits.sum()

    given = {"pair": (X[:4], X[:4]), "weight": torch.randn(6)}
    captured = capture(models.Structured(), (), given)
    found = Criterion.of(captured, Loss(loss_fn, None), 2).gradients(
        [torch.randn(2, 3), torch.randn(2, 6)]
    )
    assert torch.equal(found[0], torch.ones(2, 3))
    assert found[1:] == [None]


def test_a_loss_takes_time_and_memory_and_leaves_its_own_parameters_alone():
    scale = torch.nn.Parameter(torch.ones(()))
    _, found = criterion(lambda output, _: (output.softmax(1) * scale).pow(2).mean())
    cost = found.cost([torch.randn(2, 6)], StopWatch(CPU), CPU)
    assert cost.ms > 0
    assert cost.peak_bytes >= 3 * 2 * 6 * 4
    assert scale.grad is None


@pytest.mark.parametrize(
    ("loss_fn", "tensors"),
    [
        # Logarithms, their gradient and the output's: the output itself is gone by then.
        (lambda output, _: F.cross_entropy(output, torch.zeros(len(output)).long()), 3),
        # The number itself is in memory as large as the output, which is needed to the end.
        (lambda output, target: F.mse_loss(output, target), 3),
        (lambda output, _: output.sum(), 1),
    ],
)
def test_outputs_count_for_as_long_as_the_loss_needs_them(loss_fn, tensors):
    _, found = criterion(loss_fn, torch.randn(6, 1000))
    output = torch.randn(2, 1000)
    cost = found.cost([output], StopWatch(CPU), CPU)
    assert tensors * output.nbytes <= cost.peak_bytes <= tensors * output.nbytes + 100


def test_an_output_that_the_loss_leaves_unused_is_named_and_no_part_of_its_memory():
    given = {"pair": (X[:4], X[:4]), "weight": torch.randn(6)}
    captured = capture(models.Structured(), (), given)
    found = Criterion.of(captured, Loss(lambda answer, _: answer.logits.exp().sum(), None), 2)
    logits, hidden = torch.randn(2, 3), torch.randn(2, 10**6)
    cost = found.cost([logits, hidden], StopWatch(CPU), CPU)
    assert cost.unused == (captured.outputs[1],)
    assert cost.peak_bytes < hidden.nbytes


def test_what_is_no_loss_is_refused_as_in_a_step():
    with pytest.raises(StageError, match="loss_fn failed on micro-batch 0: ZeroDivisionError"):
        criterion(lambda output, _: 1 / 0)[1].gradients([torch.randn(2, 6)])
    with pytest.raises(InputError, match=r"loss_fn must return one number .* shape \[2, 6\]"):
        criterion(lambda output, _: output)[1].gradients([torch.randn(2, 6)])


@pytest.mark.parametrize(("looks", "known"), [(False, True), (True, False)])
def test_of_a_loss_that_looks_at_numbers_nothing_can_be_worked_out(looks, known):
    def loss_fn(output, target):
        assert not looks or output.sum().item() < 1e9
        return F.mse_loss(output, target)

    model = models.Chain()
    captured, found = criterion(loss_fn, torch.randn(6, 6), model)
    profile = analytic(
        captured, model, [X], n_microbatches=4, device="analytic:h100", criterion=found
    )
    assert (profile.loss is not None) == known


def test_a_loss_that_fails_on_fake_tensors_for_another_reason_is_told():
    model = models.Chain()
    captured, found = criterion(F.mse_loss, torch.randn(6, 5), model)
    with (
        pytest.warns(UserWarning, match="different to the input size"),
        pytest.raises(StageError, match="loss_fn failed on micro-batch 0: RuntimeError"),
    ):
        analytic(captured, model, [X], n_microbatches=4, device="analytic:h100", criterion=found)


@pytest.mark.parametrize("profile", [None, "analytic:h100"])
def test_cuts_make_room_for_the_loss(profile):
    """A loss that takes as long as the model moves all of that to the devices before the last."""
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    model, x, weight = torch.nn.Sequential(*layers), torch.randn(128, 256), torch.randn(256, 256)

    def loss_fn(output, target):
        for _ in range(8):
            output = (output @ weight).tanh()
        return F.mse_loss(output, target)

    def stages(**given):
        package = fxpipe.compile(
            model, (x,), devices=2, microbatches=2, profile=profile, schedule="1f1b", **given
        )
        return [stage.ops for stage in package.manifest.stages], package.manifest.estimate

    plain, without = stages()
    moved, found = stages(loss_fn=loss_fn, target=torch.randn(128, 256))
    assert without.loss_ms == 0 < found.loss_ms
    assert plain[1] > moved[1]
