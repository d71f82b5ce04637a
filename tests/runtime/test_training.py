"""What a training loop does around a step: accumulate, clip, scale, change the batch size."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from toys import (
    CHAIN,
    MODES,
    SCHEDULES,
    SKIPS,
    TIED,
    Part,
    Toy,
    assert_same_state,
    both,
    mean_loss,
    plain_step,
    same,
)

from fxpipe.errors import InputError
from fxpipe.runtime import Runner


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_smaller_than_the_micro_batches_goes_row_by_row(tmp_path, mode, schedule):
    model, pipe = both(tmp_path, SKIPS, m=4, schedule=schedule, checkpoint=mode)
    for batch in (3, 1, 10, 2):
        x = SKIPS.inputs(batch)
        assert same(pipe.step(*x, loss_fn=mean_loss), plain_step(SKIPS, model, x, min(batch, 4)))
        assert same(pipe(*x), model(*x))
    assert_same_state(pipe, model)


def test_a_runners_batch_may_be_smaller_too(tmp_path):
    model, pipe = both(tmp_path, CHAIN, m=4)
    (x,) = CHAIN.inputs(3)
    runner = Runner(microbatches=4)

    def closure(rows):
        (mean_loss(pipe(rows)) * runner.share).backward()

    assert len(runner.step(closure, x)) == 3
    plain_step(CHAIN, model, (x,), 3)
    assert_same_state(pipe, model)


def test_gradients_of_several_steps_add_up(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    for batch in (8, 5, 11):
        (x,) = CHAIN.inputs(batch)
        pipe.step(x, loss_fn=mean_loss)
        mean_loss(model(x)).backward()
    assert_same_state(pipe, model)


def test_a_mean_over_tokens_that_are_no_padding_is_the_batchs(tmp_path):
    """As README has it: the third micro-batch has none, whose own mean would be no number."""
    model, pipe = both(tmp_path, TIED, m=4, schedule="1f1b")
    (ids,) = TIED.inputs()
    labels = ids.roll(-1, 1)
    for row in range(len(labels)):
        labels[row, row // 2 :] = -100
    labels[6:8] = -100
    tokens_per_row = (labels != -100).sum() / len(labels)

    def loss_fn(logits, target):
        labels, tokens_per_row = target
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (tokens_per_row * len(labels))

    expected = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    expected.backward()
    found = pipe.step(ids, target=(labels, tokens_per_row), loss_fn=loss_fn)
    assert torch.allclose(found, expected, rtol=1e-6)
    for ours, plain in zip(pipe.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours.grad, plain.grad, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("toy", [CHAIN, TIED])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_norm_that_clips_is_that_of_all_stages(tmp_path, toy, norm_type):
    model, pipe = both(tmp_path, toy)
    x = toy.inputs()
    pipe.step(*x, loss_fn=mean_loss)
    plain_step(toy, model, x, 4)

    found = pipe.clip_grad_norm_(0.01, norm_type)

    assert same(found, nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type))
    assert_same_state(pipe, model)


def test_a_scaler_scales_all_stages(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    scaler = GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x = CHAIN.inputs()

    loss = pipe.step(*x, loss_fn=mean_loss, scaler=scaler)
    plain_step(CHAIN, model, x, 4)

    assert same(loss, mean_loss(model(*x)).detach())
    for name, parameter in pipe.named_parameters():
        assert same(parameter.grad, 1024 * model.get_parameter(name).grad)
    scaler.unscale_(optimizer)
    assert_same_state(pipe, model)


@pytest.mark.parametrize("name", ["first.weight", "last.weight"])
def test_a_step_whose_gradient_is_infinite_in_one_stage_is_left_out_in_all(tmp_path, name):
    _, pipe = both(tmp_path, CHAIN)
    scaler = GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    before = {key: value.clone() for key, value in pipe.state_dict().items()}
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss, scaler=scaler)
    pipe.get_parameter(name).grad[0, 0] = float("inf")

    scaler.step(optimizer)
    scaler.update()

    assert scaler.get_scale() == 1.0
    assert all(same(value, before[key]) for key, value in pipe.state_dict().items())


class Exact(nn.Module):
    """Has its products out of autocast."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            h = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return self.last(h)


def _exact(name, sizes, takes, reads, gives):
    source = f"""
        def __init__(self):
            super().__init__()
            self.{name} = nn.Linear({sizes})

        def forward(self, {takes}):
            with torch.autocast("cpu", enabled=False):
                return self.{name}({takes})
        """
    return Part(source, (reads,), (gives,))


EXACT = Toy(Exact, (_exact("first", "6, 7", "x", None, "h"), _exact("last", "7, 3", "h", 0, "y")))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_out_of_autocast_is_so_in_backward(tmp_path, mode, schedule):
    model, pipe = both(tmp_path, EXACT, m=1, schedule=schedule, checkpoint=mode)
    model.float()
    pipe.float()
    x = EXACT.inputs()[0].float().requires_grad_()
    encoder, mixed = torch.linspace(-1, 1, 36).view(6, 6), torch.linspace(-1, 1, 9).view(3, 3)

    def loss_fn(output, _=None):
        with torch.autocast("cpu", enabled=False):
            return (output @ mixed).pow(2).mean()

    expected = loss_fn(model(x @ encoder))
    expected.backward()
    gradient, x.grad = x.grad, None
    encoded = x @ encoder
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe.step(encoded, loss_fn=loss_fn)
    assert same(loss, expected.detach())
    assert same(x.grad, gradient)
    assert_same_state(pipe, model)


def test_autocast_reaches_all_stages(tmp_path):
    model, pipe = both(tmp_path, CHAIN, m=1)
    x = CHAIN.inputs()[0].float()
    model.float()
    pipe.float()
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe.step(x, loss_fn=mean_loss)
        expected = mean_loss(model(x))
    expected.backward()
    assert same(loss, expected.detach())
    assert_same_state(pipe, model)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hooks_on_saved_tensors_reach_all_stages(tmp_path, schedule):
    """As `torch.autograd.graph.save_on_cpu` has them: what torch keeps of them is a thread's."""
    model, pipe = both(tmp_path, CHAIN, m=2, schedule=schedule)
    (x,) = CHAIN.inputs()
    kept = []

    def keep(tensor):
        kept.append(tensor.shape)
        return tensor.clone()

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        expected = mean_loss(model(x[:5])) / 2 + mean_loss(model(x[5:])) / 2
        expected.backward()
        of_model = Counter(kept)
        kept.clear()
        assert same(pipe.step(x, loss_fn=mean_loss), expected.detach())
        assert Counter(kept) == of_model
        kept.clear()
        assert same(pipe(x), model(x))
    assert_same_state(pipe, model)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_a_step_is_refused_that_would_not_run_the_pipelines_own_hooks(tmp_path, kind):
    _, pipe = both(tmp_path, CHAIN)
    hook = getattr(pipe, f"register_{kind}_hook")(lambda *_: None)
    with pytest.raises(InputError, match=f"{kind.removeprefix('full_').replace('_', '-')} hook"):
        pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    mean_loss(pipe(*CHAIN.inputs())).backward()
    hook.remove()
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
