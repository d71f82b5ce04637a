"""Each trap that other pipeline runtimes fell into, by name."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from toys import (
    CHAIN,
    MODES,
    NORMED,
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

from fxpipe.errors import StageError


def _both_ways(tmp_path, toy, mode):
    """Gradients of a step and of a call equal the plain model's."""
    model, pipe = both(tmp_path, toy, schedule="1f1b", checkpoint=mode)
    x = toy.inputs()
    expected = plain_step(toy, model, x, 4)
    assert same(pipe.step(*x, loss_fn=mean_loss), expected)
    assert_same_state(pipe, model)
    for module in (pipe, model):
        module.zero_grad()
    plain_step(toy, model, x, 4)
    mean_loss(pipe(*x)).backward()
    assert_same_state(pipe, model)


def _with(toy, j, old, new, **changes):
    parts = list(toy.parts)
    assert old in parts[j].text
    parts[j] = replace(parts[j], text=parts[j].text.replace(old, new), **changes)
    return replace(toy, parts=tuple(parts))


# `h` itself is what stage 0 computed; its own backward does not need it.
IN_PLACE = _with(
    CHAIN, 1, "return torch.relu(self", "h.mul_(1)\n                return torch.relu_(self"
)


def test_in_place_op_on_a_received_leaf(tmp_path):
    _both_ways(tmp_path, IN_PLACE, "never")


def test_in_place_op_on_a_received_value_that_must_be_computed_again_is_told(tmp_path):
    _, pipe = both(tmp_path, IN_PLACE, checkpoint="always")
    with pytest.raises(StageError, match="stage 1 writes its input 'h' in place"):
        pipe(*IN_PLACE.inputs())
    with pytest.raises(StageError, match="set the stage's checkpoint to never"):
        pipe.step(*IN_PLACE.inputs(), loss_fn=mean_loss)


@pytest.mark.parametrize("mode", MODES)
def test_a_skip_with_two_consumers_under_any_schedule(tmp_path, mode):
    _both_ways(tmp_path, SKIPS, mode)


@pytest.mark.parametrize("mode", MODES)
def test_tied_weights_on_two_stages_are_added_up(tmp_path, mode):
    _both_ways(tmp_path, TIED, mode)


class Twice(nn.Module):
    """One layer used at both ends, under one name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


_LAYER = """
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    """
TWICE = Toy(
    Twice,
    (
        Part(_LAYER + "def forward(self, x):\n        return self.layer(x)", (None,), ("h",)),
        Part(_LAYER + "def forward(self, h):\n        return self.layer(h.tanh())", (0,), ("y",)),
    ),
)


@pytest.mark.parametrize("mode", MODES)
def test_one_parameter_used_by_two_stages_under_one_name(tmp_path, mode):
    _both_ways(tmp_path, TWICE, mode)


@pytest.mark.parametrize("mode", MODES)
def test_batch_norm_statistics_count_each_micro_batch_once(tmp_path, mode):
    _, pipe = both(tmp_path, NORMED, checkpoint=mode)
    pipe.step(*NORMED.inputs(), loss_fn=mean_loss)
    assert int(pipe.bn.num_batches_tracked) == 4
    mean_loss(pipe(*NORMED.inputs())).backward()
    assert int(pipe.bn.num_batches_tracked) == 8


class Moving(nn.Module):
    """A buffer assigned anew in each forward, which the result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        self.scale = 0.5 * self.scale + x.detach().abs().mean(0)
        return self.a(x) / self.scale


MOVING = Toy(
    Moving,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 6)
                self.register_buffer("scale", torch.ones(6))

            def forward(self, x):
                self.scale = 0.5 * self.scale + x.detach().abs().mean(0)
                return self.a(x) / self.scale
            """,
            (None,),
            ("y",),
            mutated=("scale",),
        ),
    ),
)


@pytest.mark.parametrize("mode", MODES)
def test_recompute_sees_the_buffers_as_they_were(tmp_path, mode):
    _both_ways(tmp_path, MOVING, mode)


VIEWS = _with(
    _with(
        CHAIN,
        0,
        "return self.first(x)",
        "return self.first(x), x, x > 0",
        outputs=("h", "x_1", "b"),
    ),
    1,
    'def forward(self, h):\n                return torch.relu(self.body["step"](h))',
    "def forward(self, h, x_1, b):\n"
    '                return torch.relu(self.body["step"](h))[:, :], x_1, x_1, b',
    sources=(0, 0, 0),
    outputs=("g", "x_2", "x_3", "b_1"),
)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_that_are_views_or_the_input_itself_or_that_nobody_reads(tmp_path, mode):
    _both_ways(tmp_path, VIEWS, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_stage_whose_output_the_loss_does_not_use(tmp_path, mode):
    model, pipe = both(tmp_path, CHAIN, checkpoint=mode)
    x = CHAIN.inputs()[0].requires_grad_()

    def constant(output, target):
        return (output.detach() * pipe.last.bias).mean()

    pipe.step(x, loss_fn=constant)
    assert pipe.first.weight.grad is None
    assert x.grad is None
    expected = sum(
        model(piece).detach().mean(0) * len(piece) / 10 / 3 for piece in x.split([3, 3, 2, 2])
    )
    assert same(pipe.last.bias.grad, expected)


def test_gradient_clipping_sees_all_stages(tmp_path):
    model, pipe = both(tmp_path, TIED)
    plain_step(TIED, model, TIED.inputs(), 4)
    pipe.step(*TIED.inputs(), loss_fn=mean_loss)
    clip = torch.nn.utils.clip_grad_norm_
    assert same(clip(pipe.parameters(), 0.1), clip(model.parameters(), 0.1))
    assert_same_state(pipe, model)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_stages_run_their_micro_batches_backward_in_the_opposite_order(tmp_path, mode):
    _, pipe = both(tmp_path, SKIPS, checkpoint=mode)
    order = []
    for stage in pipe._stages:
        seen = iter([*range(4), *[None] * 8])

        def hook(module, inputs, output, stage=stage, seen=seen):
            i = next(seen)
            if mode == "always" and i is None:
                order.append((stage.index, float(inputs[0].detach()[0, 0])))
            elif mode == "never":
                output.register_hook(lambda grad: order.append((stage.index, i)))

        stage.module.register_forward_hook(hook)
    x = SKIPS.inputs()
    mean_loss(pipe(*x)).backward()
    if mode == "never":
        for j in range(4):
            assert [i for stage, i in order if stage == j] == [3, 2, 1, 0]
    else:
        found = [value for stage, value in order if stage == 0]
        assert found == [float(piece[0, 0]) for piece in reversed(x[0].split([3, 3, 2, 2]))]
