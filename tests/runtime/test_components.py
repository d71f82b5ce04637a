"""Without torchgpipe's components, one by one and together, the numbers are the same."""

from itertools import combinations

import pytest
import torch
from toys import (
    EARLY,
    SKIPS,
    TOYS,
    assert_same_state,
    mean_loss,
    plain_step,
    same,
    write,
)

from fxpipe.errors import InputError
from fxpipe.runtime import load

NAMES = ("dependency", "streams", "portals", "checkpoint")
SUBSETS = [subset for k in range(5) for subset in combinations(NAMES, k)]


def _both(folder, toy, without, **settings):
    pipe = load(write(folder, toy, **settings), without=without)
    torch.manual_seed(2)
    model = toy.model().double()
    pipe.load_state_dict(model.state_dict())
    return model, pipe


@pytest.mark.parametrize("without", SUBSETS, ids=" ".join)
def test_all_combinations_equal_the_plain_model(tmp_path, without):
    model, pipe = _both(tmp_path, SKIPS, without, schedule="1f1b", checkpoint="except_last")
    x = SKIPS.inputs()
    expected = [plain_step(SKIPS, model, x, 4, False) for _ in range(2)]
    called = mean_loss(pipe(*x))
    called.backward()
    assert same(called.detach(), expected[0])
    assert same(pipe.step(*x, loss_fn=mean_loss), expected[1])
    assert_same_state(pipe, model)


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("name", ["early", "tied", "normed", "whole"])
def test_relays_carry_every_kind_of_value(tmp_path, name, mode):
    toy = TOYS[name]
    model, pipe = _both(tmp_path, toy, ["portals"], checkpoint=mode)
    x = toy.inputs()
    for run in (lambda: pipe.step(*x, loss_fn=mean_loss), lambda: mean_loss(pipe(*x))):
        expected = plain_step(toy, model, x, 4, False)
        loss = run()
        assert same(loss.detach(), expected)
        if loss.requires_grad:
            loss.backward()
    assert_same_state(pipe, model)


def test_a_value_goes_from_stage_to_stage_without_portals(tmp_path):
    folder = write(tmp_path, SKIPS)
    straight, hops = (
        load(folder, without=without)._wires[True].readers for without in ((), ("portals",))
    )
    assert straight[0, "a_1"] == (1, 2, 3)
    assert hops[0, "a_1"] == (1,)
    assert hops[1, "a_1 of 0"] == (2,)
    assert hops[2, "a_1 of 0"] == (3,)


def test_an_output_of_an_early_stage_goes_through_the_later_ones(tmp_path):
    pipe = load(write(tmp_path, EARLY), without=["portals"])
    n = len(pipe.manifest.stages)
    assert {output.stage for output in pipe.manifest.outputs} <= {None, n - 1}


def _nodes(tensor):
    left, seen = [tensor.grad_fn], set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left.extend(following for following, _ in node.next_functions)
    return {type(node).__name__ for node in seen}


def test_nothing_is_forked_and_joined_without_dependency(tmp_path):
    folder, x = write(tmp_path, SKIPS), SKIPS.inputs()
    assert {"ForkBackward", "JoinBackward"} <= _nodes(mean_loss(load(folder)(*x)))
    without = load(folder, without=["dependency"])
    assert not {"ForkBackward", "JoinBackward"} & _nodes(mean_loss(without(*x)))


def test_nothing_is_recomputed_without_checkpoint(tmp_path):
    pipe = load(write(tmp_path, SKIPS, checkpoint="always"), without=["checkpoint"])
    assert {stage.spec.checkpoint for stage in pipe._stages} == {"never"}


def test_copies_are_on_the_compute_streams_without_streams(tmp_path):
    pipe = load(write(tmp_path, SKIPS), without=["streams"])
    ends = [end for lane in pipe._new_call(4)._links._ends for end in lane]
    assert all(end.copy == end.compute for end in ends)


def test_an_unknown_component_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no 'stream'; use dependency, streams, portals"):
        load(write(tmp_path, SKIPS), without=["stream"])
