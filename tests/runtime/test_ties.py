"""A lane has one stand-in for another lane's parameter, however many of its stages use it."""

import pytest
import torch
from toys import MODES, SHARES, assert_same_state, both, mean_loss, plain_step, same

from fxpipe.errors import InputError
from fxpipe.runtime import ties

DEVICES = (0, 1, 1)
# The same by 1F1B, each backward in halves.
HALVED = "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0F3,0I2,0W2,0I3,0W3\n" + ",".join(
    f"1F{i},2F{i},2I{i},1I{i},2W{i},1W{i}" for i in range(4)
)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("table", [None, HALVED], ids=["whole", "halved"])
@pytest.mark.parametrize("mode", MODES)
def test_two_stages_of_a_lane_have_one_leaf_of_a_weight(tmp_path, request, mode, table, apart):
    if apart:
        request.getfixturevalue("_apart")
    model, pipe = both(tmp_path, SHARES, checkpoint=mode, devices=DEVICES, table=table)
    x, seen = SHARES.inputs(), []

    def loss_fn(output, target=None):
        b, last = (stage.module for stage in pipe._stages[1:])
        seen.append([b.b.weight, last.c.weight, last.d.weight])
        return mean_loss(output)

    for _ in range(2):
        expected = plain_step(SHARES, model, x, 4)
        assert same(pipe.step(*x, loss_fn=loss_fn), expected)
        assert_same_state(pipe, model)
    for first, *others in seen:
        assert all(other is first for other in others)
    plain_step(SHARES, model, x, 4)
    mean_loss(pipe(*x)).backward()
    assert_same_state(pipe, model)


@pytest.mark.usefixtures("_apart")
def test_a_call_copies_a_weight_to_another_device_once(tmp_path):
    _, pipe = both(tmp_path, SHARES, devices=DEVICES)
    with ties.copied(pipe._state.ties, pipe._state.parameters(pipe)) as copies:
        assert copies.keys() == {1, 2}
        copy = copies[1]["b.weight"]
        assert copies[2]["c.weight"] is copies[2]["d.weight"] is copy
        assert torch.equal(copy, pipe.a.weight)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_step_is_refused_whose_hook_would_see_a_sum_over_micro_batches(tmp_path, kind):
    model, pipe = both(tmp_path, SHARES, devices=DEVICES)
    x = SHARES.inputs()
    calls = []
    shared = pipe.get_parameter(pipe._state.ties[0].owner)
    hook = getattr(shared, kind)(lambda seen: calls.append(seen))
    with pytest.raises(InputError, match="a hook on it would get the sum of what the others have"):
        pipe.step(*x, loss_fn=mean_loss)
    mean_loss(pipe(*x)).backward()
    assert len(calls) == 1
    hook.remove()
    pipe.zero_grad()
    expected = plain_step(SHARES, model, x, 4)
    assert same(pipe.step(*x, loss_fn=mean_loss), expected)
