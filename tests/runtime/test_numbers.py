"""Outputs, gradients and buffers are the plain model's, run micro-batch by micro-batch."""

from dataclasses import replace

import pytest
import torch
from pairs import all_pairs
from toys import (
    CHAIN,
    EARLY,
    MODES,
    NOISY,
    SCHEDULES,
    SKIPS,
    TIED,
    TOYS,
    assert_same_state,
    both,
    mean_loss,
    microbatched_outputs,
    plain_step,
    rows,
    same,
)

from fxpipe.passes import order
from fxpipe.runtime.structure import describe


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TOYS)
def test_step_equals_the_plain_model(tmp_path, name, mode, schedule):
    toy = TOYS[name]
    model, pipe = both(tmp_path, toy, schedule=schedule, checkpoint=mode)
    x = toy.inputs()
    # Twice: the second step begins with the first one's gradients and buffers.
    for _ in range(2):
        torch.manual_seed(5)
        expected = plain_step(toy, model, x, 4, toy is NOISY)
        torch.manual_seed(5)
        assert same(pipe.step(*x, loss_fn=mean_loss), expected)
    assert_same_state(pipe, model)


def looped(schedule: str, n: int, m: int, halves: bool) -> str:
    """The table of n stages on two devices; if `halves`, W stands two places after I."""
    rows = []
    for row in order.build(schedule, 2, m, loops=2).rows:
        cells = [str(action) for action in row if action.stage < n]
        for cell in [cell for cell in cells if halves and "B" in cell]:
            place = cells.index(cell)
            cells[place] = cell.replace("B", "I")
            cells.insert(place + 3, cell.replace("B", "W"))
        rows.append(",".join(cells))
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("name", "mode", "schedule", "halves"),
    all_pairs(TOYS, MODES, ["interleaved", "bfs"], [False, True]),
)
def test_several_stages_a_device_equal_the_plain_model(tmp_path, name, mode, schedule, halves):
    toy = TOYS[name]
    n = len(toy.parts)
    table = looped(schedule, n, 4, halves)
    model, pipe = both(tmp_path, toy, checkpoint=mode, devices=(0, 1, 0, 1)[:n], table=table)
    x = toy.inputs()
    torch.manual_seed(5)
    expected = plain_step(toy, model, x, 4, toy is NOISY)
    torch.manual_seed(5)
    assert same(pipe.step(*x, loss_fn=mean_loss), expected)
    assert_same_state(pipe, model)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TOYS)
def test_forward_and_backward_equal_the_plain_model(tmp_path, name, mode, training):
    toy = TOYS[name]
    model, pipe = both(tmp_path, toy, checkpoint=mode)
    model.train(training)
    pipe.train(training)
    x = toy.inputs()
    torch.manual_seed(5)
    expected = plain_step(toy, model, x, 4, toy is NOISY)
    torch.manual_seed(5)
    loss = mean_loss(pipe(*x))
    assert same(loss.detach(), expected)
    loss.backward()
    assert_same_state(pipe, model)


@pytest.mark.parametrize("name", TOYS)
def test_outputs_come_in_the_originals_structure_without_grad_too(tmp_path, name):
    toy = TOYS[name]
    model, pipe = both(tmp_path, toy, checkpoint="always")
    x = toy.inputs()
    with torch.no_grad():
        torch.manual_seed(5)
        parts = [
            describe(output)[1] for output in microbatched_outputs(toy, model, x, 4, toy is NOISY)
        ]
        torch.manual_seed(5)
        structure, leaves = describe(pipe(*x))
    assert structure == describe(model(*x))[0]
    for k, leaf in enumerate(leaves):
        assert not leaf.requires_grad
        pieces = [part[k] for part in parts]
        if leaf.dim() == 0:
            assert same(leaf, sum(p * n / 10 for p, n in zip(pieces, rows(10, 4), strict=True)))
        else:
            assert same(leaf, torch.cat(pieces) if len(leaf) == 10 else pieces[-1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lanes", [(0, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 1)])
def test_several_stages_on_a_device(tmp_path, lanes, mode):
    model, pipe = both(tmp_path, SKIPS, devices=lanes, checkpoint=mode)
    x = SKIPS.inputs()
    expected = plain_step(SKIPS, model, x, 4)
    assert same(pipe.step(*x, loss_fn=mean_loss), expected)
    assert_same_state(pipe, model)
    pipe.zero_grad()
    mean_loss(pipe(*x)).backward()
    assert_same_state(pipe, model)


@pytest.mark.parametrize("m", [1, 3, 10])
def test_any_number_of_micro_batches(tmp_path, m):
    model, pipe = both(tmp_path, CHAIN, m=m, checkpoint="except_last")
    x = CHAIN.inputs()
    expected = plain_step(CHAIN, model, x, m)
    assert same(pipe.step(*x, loss_fn=mean_loss), expected)
    assert_same_state(pipe, model)


@pytest.mark.parametrize("mode", MODES)
def test_callers_tensors_get_their_gradients(tmp_path, mode):
    model, pipe = both(tmp_path, EARLY, checkpoint=mode)

    def inputs():
        x, shift = EARLY.inputs()
        return x.requires_grad_(), torch.ones_like(shift).requires_grad_()

    plain, stepped, called = inputs(), inputs(), inputs()
    plain_step(EARLY, model, plain, 4)
    pipe.step(*stepped, loss_fn=mean_loss)
    # `given` is the caller's `shift` itself, an output of the model.
    output = pipe(*called)
    assert output["given"] is called[1]
    mean_loss(output).backward()
    for expected, by_step, by_call in zip(plain, stepped, called, strict=True):
        assert same(by_step.grad, expected.grad)
        assert same(by_call.grad, expected.grad)


def test_ragged_last_chunk_and_another_batch_size_in_the_next_step(tmp_path):
    model, pipe = both(tmp_path, SKIPS, schedule="1f1b")
    for batch in (10, 7, 32, 4, 10):
        x = SKIPS.inputs(batch)
        expected = plain_step(SKIPS, model, x, 4)
        assert same(pipe.step(*x, loss_fn=mean_loss), expected)
    assert_same_state(pipe, model)


def test_target_is_cut_like_the_batch(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    x = CHAIN.inputs()
    labels, scale = torch.randn(10, 3, dtype=torch.float64), torch.tensor(2.0)

    def loss_fn(output, target):
        return (output - target["labels"]).pow(2).mean() * target["more"][0]

    target = {"labels": labels, "more": [scale, None]}
    loss = pipe.step(*x, target=target, loss_fn=loss_fn)
    expected = loss_fn(model(*x), target)
    expected.backward()
    assert same(loss, expected.detach())
    assert_same_state(pipe, model)


@pytest.mark.parametrize("mode", MODES)
def test_calls_and_steps_may_alternate_and_overlap(tmp_path, mode):
    model, pipe = both(tmp_path, SKIPS, checkpoint=mode)
    x = SKIPS.inputs()
    first, second = mean_loss(pipe(*x)), mean_loss(pipe(*x))
    pipe.step(*x, loss_fn=mean_loss)
    second.backward(retain_graph=True)
    second.backward()
    first.backward()
    for _ in range(4):
        plain_step(SKIPS, model, x, 4)
    assert_same_state(pipe, model)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_can_be_asked_for_without_accumulating(tmp_path, mode):
    model, pipe = both(tmp_path, SKIPS, checkpoint=mode)
    x = SKIPS.inputs()
    found = torch.autograd.grad(mean_loss(pipe(*x)), list(pipe.parameters()))
    assert all(p.grad is None for p in pipe.parameters())
    plain_step(SKIPS, model, x, 4)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        assert same(gradient, parameter.grad)


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_and_stages(tmp_path, mode):
    model, pipe = both(tmp_path, CHAIN, checkpoint=mode)
    for module in (model, pipe):
        module.first.requires_grad_(False)
        module.last.bias.requires_grad_(False)
    x = CHAIN.inputs()
    plain_step(CHAIN, model, x, 4)
    pipe.step(*x, loss_fn=mean_loss)
    assert_same_state(pipe, model)
    assert pipe.first.weight.grad is None
    pipe.zero_grad()
    mean_loss(pipe(*x)).backward()
    assert_same_state(pipe, model)


class FrozenTie(TIED.model):
    def __init__(self):
        super().__init__()
        self.embed.weight.requires_grad_(False)


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_of_two_lanes_may_be_frozen(tmp_path, mode):
    toy = replace(TIED, model=FrozenTie)
    model, pipe = both(tmp_path, toy, checkpoint=mode)
    x = toy.inputs()
    plain_step(toy, model, x, 4)
    pipe.step(*x, loss_fn=mean_loss)
    assert_same_state(pipe, model)
    assert pipe.embed.weight.grad is None


def test_two_runs_give_the_same_bits(tmp_path):
    _, pipe = both(tmp_path, NOISY, schedule="1f1b", checkpoint="except_last")
    x = NOISY.inputs()
    runs = []
    for run in (lambda: pipe.step(*x, loss_fn=mean_loss), lambda: mean_loss(pipe(*x)).backward()):
        for _ in range(3):
            pipe.zero_grad()
            torch.manual_seed(3)
            run()
            runs.append([p.grad for p in pipe.parameters()])
        assert all(map(torch.equal, runs[-1], runs[-2]))
        assert all(map(torch.equal, runs[-1], runs[-3]))
