"""Profile: ops of one signature are measured once; saved storages are those of torch itself."""

import copy
from math import inf

import models
import pytest
import torch
from torch.nn import functional as F

from fxpipe.capture import capture
from fxpipe.costs.meter import Meter
from fxpipe.costs.whole import Whole
from fxpipe.errors import InputError
from fxpipe.ir import OpCost
from fxpipe.ops.interpret import run_graph
from fxpipe.passes.linearize import linearize
from fxpipe.passes.profile import _on_gpus, _scaled, profile
from fxpipe.runtime import whole_backward
from fxpipe.runtime.device_names import parse_devices


def measured(model, x, m=2):
    captured = capture(model, (x,), {})
    return captured, profile(captured, model, [x], n_microbatches=m, devices=parse_devices("cpu*2"))


def really_saved(model, x):
    """Bytes that autograd keeps of a forward, each storage once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    assert output.requires_grad
    return sum(size for address, (size, _) in saved.items() if address not in own)


def test_every_op_has_a_cost_in_both_directions():
    captured, found = measured(models.Norms(), torch.randn(8, 3, 8, 8))
    assert found.costs.keys() == captured.ops.keys()
    assert all(cost.forward_ms > 0 for cost in found.costs.values())
    conv = next(name for name, op in captured.ops.items() if op.module == "conv")
    assert found.costs[conv].backward_ms > 0


def costs_by_module(model, x):
    captured, found = measured(model, x)
    return {op.module: found.costs[name] for name, op in captured.ops.items()}


@pytest.mark.parametrize("cut", [torch.Tensor.detach, torch.Tensor.byte, lambda x: x.argmax(1)])
def test_what_no_gradient_comes_back_to_takes_no_time_backward(cut):
    class Cut(torch.nn.Module):
        def __init__(self):
            super().__init__()
            # Large, so that what there is to measure is no matter of what else the machine does.
            self.before, self.after = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)
            self.table = torch.nn.Embedding(256, 256)

        def forward(self, x):
            codes = cut(self.before(x))
            x = codes if codes.is_floating_point() else self.table(codes.long())
            return self.after(x)

    cost_of = costs_by_module(Cut(), torch.rand(512, 256))
    assert (cost_of["before"].backward_ms, cost_of["before"].weight_gradient_ms) == (0, 0)
    assert cost_of["after"].backward_ms > 0


def test_what_is_written_in_place_has_a_backward():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            # Large, so that what a busy machine adds to the forward doesn't count for the backward.
            self.before, self.scale = torch.nn.Linear(256, 256), torch.nn.Linear(256, 128)

        def forward(self, x):
            y = self.before(x)
            y[:, :128].mul_(self.scale(x))
            return y.tanh()

    cost_of = costs_by_module(Scaled(), torch.rand(256, 256))
    assert min(cost_of[name].backward_ms for name in ("before", "scale")) > 0


def test_equal_ops_are_measured_once():
    captured, found = measured(models.Chain(), torch.randn(8, 6))
    first, *others = (found.costs[name] for name in captured.ops)
    del first  # its input needs no gradient
    assert len({(cost.forward_ms, cost.backward_ms) for cost in others}) == 1


def test_the_part_of_a_backward_that_is_for_weights():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)
            self.scale = torch.nn.Parameter(torch.ones(256))

        def forward(self, x):
            hidden = torch.tanh(self.first(x))
            return self.second(hidden) * self.scale.exp()

    captured, found = measured(Scaled(), torch.randn(512, 256))
    costs = {op.module or name: found.costs[name] for name, op in captured.ops.items()}
    assert costs["first"].weight_gradient_ms == costs["first"].backward_ms > 0
    assert 0 < costs["second"].weight_gradient_ms < costs["second"].backward_ms
    assert costs["hidden"].weight_gradient_ms == 0
    assert costs["exp"].weight_gradient_ms == costs["exp"].backward_ms


def test_gradients_wait_for_the_second_half_before_each_layer_of_an_op():
    class Attends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(16, 16)
            self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            hidden = self.first(x)
            return self.attention(hidden, hidden, hidden, need_weights=False)[0]

    _, found = measured(Attends(), torch.randn(4, 32, 16))
    result_bytes = 2 * 32 * 16 * 4
    # The output's layer has the gradient of the result, the input's that of three as large.
    assert sum(cost.arriving_bytes for cost in found.costs.values()) == 4 * result_bytes


def test_what_is_made_of_weights_and_of_a_size_waits_for_the_second_half():
    class Places(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(16, 16)
            self.places = torch.nn.Parameter(torch.rand(1, 16, 8))

        def forward(self, x):
            return self.first(x) @ self.places.repeat(x.size(0), 1, 1)

    captured, found = measured(Places(), torch.randn(4, 32, 16))
    (product,) = captured.outputs
    assert found.costs[product].arriving_bytes == 2 * 32 * 8 * 4


def test_gradients_of_large_weights_are_added_to_those_that_are_there(monkeypatch):
    class Casts(torch.nn.Module):
        """A layer that no input leads to, one whose weight is made of another, and one more."""

        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (torch.nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            y = F.linear(self.first(x), self.second.weight * 2)
            return self.third(y)

    for large, expected in [(16 * 16 * 4, 16 * 16 * 4), (16 * 16 * 4 + 1, 0)]:
        monkeypatch.setattr(whole_backward, "_LARGE_BYTES", large)
        captured, found = measured(Casts(), torch.randn(4, 16))
        (last,) = captured.outputs
        assert {name: c.added_bytes for name, c in found.costs.items() if c.added_bytes} == (
            {last: expected} if expected else {}
        )


def test_an_op_of_many_layers_lets_go_of_what_the_last_ones_saved():
    x = torch.randn(4, 16, 8)
    _, found = measured(torch.nn.GRU(8, 32, batch_first=True), x)
    steps = max(found.costs.values(), key=lambda cost: cost.backward_bytes)
    assert 0 < steps.freed_bytes < steps.backward_bytes
    _, found = measured(models.Chain(), torch.randn(4, 6))
    assert not any(cost.freed_bytes for cost in found.costs.values())


def test_a_frozen_module_and_a_trained_one_of_the_same_text_cost_their_own():
    frozen, trained = torch.nn.Linear(16, 16).requires_grad_(False), torch.nn.Linear(16, 16)
    model = torch.nn.Sequential(frozen, torch.nn.Tanh(), trained, torch.nn.Tanh(), frozen)
    first, _, second, _, last = measured(model, torch.randn(8, 16))[1].costs.values()
    row_bytes = 4 * 16 * 4
    assert [sum(dict(cost.saved).values()) for cost in (first, second, last)] == [0, row_bytes, 0]
    assert first.backward_ms == first.weight_gradient_ms == last.weight_gradient_ms == 0


def test_a_weight_whose_shape_alone_is_read_gets_no_gradient():
    class Standardized(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.weight = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.rand(4, 4))

        def forward(self, x):
            normed = F.layer_norm(self.weight.reshape(1, 16), (16,))
            return F.linear(self.layer(x), normed.reshape_as(self.weight))

    captured, found = measured(Standardized(), torch.randn(4, 4))
    assert [cost.shapes_of for cost in found.costs.values() if cost.shapes_of] == [("weight",)]
    chain = linearize(captured, found)
    reads = [dict(block.parameters).get("weight") for block in chain.blocks]
    trained = [dict(block.trained).get("weight") for block in chain.blocks]
    assert sorted(map(str, reads)) == ["64", "64", "None", "None", "None"]
    assert sorted(map(str, trained)) == ["64", "None", "None", "None", "None"]


def test_a_gradient_in_another_layout_waits_beside_its_copy():
    """A linear layer on transposed memory is a product and a sum; each keeps what comes to it."""

    class Mixes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.mix = torch.nn.Linear(16, 16), torch.nn.Linear(32, 32)

        def forward(self, x):
            return self.mix(self.first(x).transpose(1, 2)).transpose(1, 2)

    captured, found = measured(Mixes(), torch.randn(4, 32, 16))
    (op,) = (name for name, op in captured.ops.items() if op.module == "mix")
    assert found.costs[op].arriving_bytes == 2 * (2 * 16 * 32 * 4)


def test_a_gradient_that_comes_in_its_own_layout_waits_alone():
    class Mixes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

        def forward(self, x):
            mixed = self.second(torch.nn.functional.gelu(self.first(x.transpose(1, 2))))
            return x + mixed.transpose(1, 2)

    captured, found = measured(Mixes(), torch.randn(4, 32, 16, requires_grad=True))
    (op,) = (name for name, op in captured.ops.items() if op.module == "first")
    assert found.costs[op].arriving_bytes == 2 * 16 * 64 * 4


def test_ops_add_up_to_the_whole():
    costs = {name: OpCost(2.0, 3.0) for name in "abc"}
    scaled = _scaled(costs, Whole(forward_ms=60.0, backward_ms=6.0, halves_ms=7.5, loss_ms=0.5))
    assert sum(cost.forward_ms for cost in scaled.values()) == pytest.approx(60)
    assert sum(cost.backward_ms for cost in scaled.values()) == pytest.approx(6)
    assert [cost.halving_ms for cost in scaled.values()] == [0.5] * 3


def test_a_slow_spell_of_the_machine_does_not_count(monkeypatch):
    usual = Whole(60.0, 6.0, 7.5, 0.5)
    spells = iter([usual._replace(forward_ms=600.0), usual, usual._replace(backward_ms=66.0)])
    monkeypatch.setattr("fxpipe.passes.profile.whole_ms", lambda *_: next(spells))
    _, found = measured(models.Chain(), torch.randn(20_000, 6))
    assert sum(cost.forward_ms for cost in found.costs.values()) == pytest.approx(60)
    assert sum(cost.backward_ms for cost in found.costs.values()) == pytest.approx(6)


def test_halves_that_take_no_longer_cost_nothing():
    scaled = _scaled({"a": OpCost(2.0, 3.0), "b": OpCost(1.0, 0.0)}, Whole(6.0, 6.0, 5.0, 0.5))
    assert [cost.halving_ms for cost in scaled.values()] == [0.0, 0.0]
    scaled = _scaled({"a": OpCost(2.0, 3.0), "b": OpCost(1.0, 0.0)}, Whole(6.0, 6.0, 7.0, 0.5))
    assert [cost.halving_ms for cost in scaled.values()] == [1.0, 0.0]  # b has no backward
    scaled = _scaled({"a": OpCost(2.0, 3.0), "b": OpCost(1.0, 3.0)}, Whole(6.0, 6.0, inf, 0.5))
    assert [cost.halving_ms for cost in scaled.values()] == [3.0, 3.0]


def test_saved_bytes_count_each_storage_once():
    for model, x in [
        (models.Norms(), torch.randn(8, 3, 8, 8)),
        (models.Skip(), torch.randn(8, 6)),
        (models.Chain(), torch.randn(8, 6)),
    ]:
        _, found = measured(model, x, m=1)
        storages = {name: size for cost in found.costs.values() for name, size in cost.saved}
        assert sum(storages.values()) == really_saved(model, x)


def test_costs_are_of_one_microbatch():
    _, found = measured(models.Chain(), torch.randn(9, 6), m=2)
    assert found.batch == 5
    assert [size for _, size in list(found.costs.values())[2].saved] == [5 * 6 * 4]


def test_a_microbatch_that_the_model_refuses_is_told():
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
    with pytest.raises(InputError, match=r"micro-batch of 1 rows.*fewer micro-batches"):
        measured(model, torch.randn(2, 6), m=2)


def test_so_is_a_smaller_one_than_is_measured():
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))
    with pytest.raises(InputError, match=r"micro-batch of 1 rows.*batch of 3: use fewer"):
        measured(model, torch.randn(3, 6), m=2)


def test_an_input_with_the_batch_in_another_dimension_is_told_how_to_be_given():
    class Kinds(torch.nn.Linear):
        def forward(self, x, positions):
            return super().forward(x) * positions.sum(0)

    given = torch.randn(6, 4), torch.randn(3, 6, 4)
    model = Kinds(4, 4)
    captured = capture(model, given, {})
    says = (
        r"micro-batch of 2 rows, though not on the whole batch of 6\n(.|\n)*"
        r"If positions has the batch in dimension 1: give it as \[batch, 3, 4\] to a wrapper .*"
        r"positions\.movedim\(0, 1\)\nElse use fewer"
    )
    with pytest.raises(InputError, match=says):
        profile(captured, model, given, n_microbatches=3, devices=parse_devices("cpu*2"))


def test_an_index_beyond_the_rows_of_a_microbatch_is_told_with_what_goes_whole():
    class Edges(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Linear(6, 6)

        def forward(self, nodes, edges):
            return self.mix(nodes)[edges].sum(0) + nodes

    inputs = torch.randn(8, 6), torch.tensor([0, 7, 3])
    captured = capture(Edges(), inputs, {})
    with pytest.raises(InputError, match=r"IndexError: .*\nedges: given whole to each"):
        profile(captured, Edges(), inputs, n_microbatches=4, devices=parse_devices("cpu*2"))


def test_measuring_leaves_buffers_alone():
    model = models.Norms()
    measured(model, torch.randn(8, 3, 8, 8))
    assert model.bn.num_batches_tracked == 0
    assert torch.equal(model.bn.running_mean, torch.zeros(4))


def test_measuring_leaves_autocast_off():
    class Cast(torch.nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = x @ x.T
            return x * y.float().mean()

    measured(Cast(), torch.randn(8, 6, requires_grad=True))
    assert not torch.is_autocast_enabled("cpu")


def test_what_eval_mode_alone_gives_costs_a_step_nothing():
    class Cached(models.Chain):
        def forward(self, x):
            y = self.layers(x)
            return {"y": y} if self.training else {"y": y, "cache": x * 2}

    captured, found = measured(Cached(), torch.randn(8, 6))
    assert found.costs.keys() < captured.ops.keys()


def test_a_view_of_a_parameter_under_no_grad_has_no_backward():
    """Spectral norm takes one; torch says of it that it requires a gradient."""
    model = torch.nn.Sequential(
        torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 6)), torch.nn.ReLU()
    )
    captured, found = measured(model, torch.randn(8, 6))
    (view,) = (n.name for n in captured.graph.nodes if n.target is getattr and "H" in n.args)
    assert found.costs[view].backward_ms == 0
    assert sum(cost.backward_ms for cost in found.costs.values()) > 0


def test_a_module_that_was_moved_is_the_one_that_is_measured():
    """As to a GPU: the capture's own has no part in it, and its weights would get no gradient."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(2, 4)
    captured = capture(model, (x,), {})
    moved = copy.deepcopy(dict(captured.modules))
    meter = Meter(captured, moved, torch.device("cpu"), lambda run, given: 1.0)
    run_graph(captured.graph, moved, captured.state, [x], meter)
    (cost,) = meter.costs.values()
    assert cost.weight_gradient_ms == cost.backward_ms == 1.0


def test_libraries_hold_what_the_ops_left_not_what_was_there_nor_what_parts_leave(monkeypatch):
    left, x = iter([7, 5, 9]), torch.randn(4, 6)
    drop = "fxpipe.passes.profile.drop_workspaces"
    monkeypatch.setattr(drop, lambda device: next(left))
    captured = capture(models.Chain(), (x,), {})
    *_, held = _on_gpus(captured, [x], [torch.device("cpu")], None)
    assert held == 5
