"""To an optimizer, a checkpoint or a dtype change the pipeline is the original model."""

import copy

import pytest
import torch
from toys import CHAIN, EARLY, NORMED, TIED, TOYS, both, mean_loss, microbatched_outputs, same

from fxpipe.errors import DeviceError, InputError, WeightsError
from fxpipe.runtime import load
from fxpipe.runtime.weights.state import shell


@pytest.mark.parametrize("name", TOYS)
def test_names_order_and_values_are_the_originals(tmp_path, name):
    model, pipe = both(tmp_path, TOYS[name])
    assert list(pipe.state_dict()) == list(model.state_dict())
    for kind in ("named_parameters", "named_buffers"):
        found, expected = getattr(pipe, kind)(), getattr(model, kind)()
        for (found_name, a), (expected_name, b) in zip(found, expected, strict=True):
            assert found_name == expected_name
            assert torch.equal(a, b)
    assert {n for n, _ in model.named_modules()} >= {n for n, _ in pipe.named_modules()}


def test_children_named_as_methods_or_attributes_do_not_collide(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    assert pipe.get_submodule("body").get_parameter("stages.weight").shape == (7, 7)
    assert callable(pipe.step)


def test_children_are_reached_as_those_of_the_originals_lists_and_dicts(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    assert same(pipe.body["step"].weight, model.body["step"].weight)
    assert [*pipe.body] == [*pipe.body.children()]
    with pytest.raises(KeyError, match="other"):
        pipe.body["other"]
    root = torch.nn.Module()
    block = shell(root, "blocks.0")
    assert root.blocks[0] is block
    with pytest.raises(IndexError, match="1"):
        root.blocks[1]


def test_settings_of_a_module_are_those_of_the_stages_module(tmp_path):
    model, pipe = both(tmp_path, NORMED)
    norms = [n for n, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm1d)]
    for module in (root.get_submodule(name) for root in (model, pipe) for name in norms):
        module.training, module.eps = False, 0.5
    assert same(pipe(*NORMED.inputs()), model(*NORMED.inputs()))


def test_a_method_that_only_the_models_module_has_is_told_with_the_way_out(tmp_path):
    model, pipe = both(tmp_path, NORMED)
    pipe(*NORMED.inputs())
    assert not hasattr(pipe.bn, "reset_running_stats")
    with pytest.raises(AttributeError, match=r"no 'reset_running_stats'.* load_state_dict"):
        pipe.bn.reset_running_stats()
    model.bn.reset_running_stats()
    pipe.load_state_dict(model.state_dict())
    assert not pipe.bn.running_mean.any()


@pytest.mark.parametrize("setting", ["p", "forward"])
def test_a_setting_that_no_stage_has_is_refused(tmp_path, setting):
    _, pipe = both(tmp_path, CHAIN)
    with pytest.raises(InputError, match="stage"):
        setattr(pipe.body, setting, 0.5)


def test_optimizers_see_a_tied_parameter_once(tmp_path):
    model, pipe = both(tmp_path, TIED)
    assert len(list(pipe.parameters())) == len(list(model.parameters()))
    assert pipe.head.weight is pipe.embed.weight


def test_training_with_an_optimizer_follows_the_plain_model(tmp_path):
    model, pipe = both(tmp_path, TIED, schedule="1f1b")
    x = TIED.inputs()
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in (model, pipe)]
    for _ in range(3):
        expected = mean_loss(model(*x))
        expected.backward()
        assert same(pipe.step(*x, loss_fn=mean_loss), expected.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", TOYS)
def test_what_a_step_changed_goes_into_the_plain_model_and_back(tmp_path, name):
    toy = TOYS[name]
    model, pipe = both(tmp_path, toy)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    pipe.step(*toy.inputs(), loss_fn=mean_loss)
    optimizer.step()
    trained = copy.deepcopy(pipe.state_dict())
    torch.save(pipe.state_dict(), tmp_path / "trained.pt")
    model.load_state_dict(torch.load(tmp_path / "trained.pt"), strict=True)
    again = load(tmp_path).double()
    again.load_state_dict(model.state_dict(), strict=True)
    assert list(again.state_dict()) == list(trained)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in trained.items())
    plain = model.state_dict()
    assert all(torch.equal(plain[name], tensor) for name, tensor in trained.items())


@pytest.mark.parametrize("name", ["chain", "tied", "normed"])
def test_dtype_changes_keep_stages_and_tree_the_same_objects(tmp_path, name):
    toy = TOYS[name]
    model, pipe = both(tmp_path, toy)
    pipe.float().double()
    model.float().double()
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.mul_(1.5)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        found = pipe(*toy.inputs())
        expected = torch.cat(microbatched_outputs(toy, model, toy.inputs(), 4, False))
    assert same(found, expected)
    for buffer, plain in zip(pipe.buffers(), model.buffers(), strict=True):
        assert same(buffer.double(), plain.double())


@pytest.mark.parametrize("move", [lambda p: p.to("meta"), lambda p: p.cuda()])
def test_moving_is_refused_with_the_way_out(tmp_path, move):
    if torch.cuda.is_available():
        pytest.skip("cuda() would succeed on a machine with one CUDA device")
    _, pipe = both(tmp_path, CHAIN)
    with pytest.raises(DeviceError, match="devices="):
        move(pipe)
    assert pipe.to("cpu") is pipe


def test_train_and_eval_reach_the_stages_also_from_a_part_of_the_tree(tmp_path):
    _, pipe = both(tmp_path, NORMED)
    assert pipe.training
    pipe.bn.eval()
    before = pipe.bn.running_mean.clone(), pipe.bn2.running_mean.clone()
    pipe(*NORMED.inputs())
    assert torch.equal(pipe.bn.running_mean, before[0])
    assert not torch.equal(pipe.bn2.running_mean, before[1])
    pipe.eval()
    after = pipe.bn2.running_mean.clone()
    pipe(*NORMED.inputs())
    assert torch.equal(pipe.bn2.running_mean, after)


def test_all_that_is_wrong_with_weights_is_told_before_any_is_loaded(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    before = copy.deepcopy(pipe.state_dict())
    wrong = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    del wrong["first.bias"]
    wrong["first.weight"] = torch.zeros(2, 2)
    wrong["other"] = torch.zeros(1)
    with pytest.raises(WeightsError) as error:
        pipe.load_state_dict(wrong)
    for part in ("1 missing: first.bias", "1 unexpected: other", "expected [7, 6], found [2, 2]"):
        assert part in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in pipe.state_dict().items())
    del wrong["first.weight"]
    result = pipe.load_state_dict(wrong, strict=False)
    assert sorted(result.missing_keys) == ["first.bias", "first.weight"]


def test_what_modules_add_to_their_state_is_kept_and_given_back(tmp_path):
    class Counts(CHAIN.model):
        def get_extra_state(self):
            return {"steps": 3}

        def set_extra_state(self, state):
            self.steps = state["steps"]

    _, pipe = both(tmp_path, CHAIN)
    model = Counts().double()
    pipe.load_state_dict(model.state_dict())
    assert pipe.state_dict().keys() == model.state_dict().keys()
    assert copy.deepcopy(pipe).state_dict()["_extra_state"] == {"steps": 3}
    model.load_state_dict(pipe.state_dict())
    assert model.steps == 3
    pipe.load_state_dict(pipe.state_dict())
    assert same(pipe(*CHAIN.inputs()), model(*CHAIN.inputs()))


def test_what_the_model_notes_beside_its_tensors_is_kept_with_a_whole_state(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    noted = {**model.state_dict(), "_note": {"width": 6}}
    pipe.load_state_dict(noted)
    assert pipe.state_dict()["_note"] == {"width": 6}
    with pytest.raises(WeightsError, match=r"1 unexpected: first\.no_extra_state"):
        pipe.load_state_dict({**noted, "first.no_extra_state": torch.zeros(1)})
    with pytest.raises(WeightsError, match=r"8 missing[^$]*2 unexpected: model, epoch"):
        pipe.load_state_dict({"model": model.state_dict(), "epoch": 3})


def test_assigned_weights_are_shared_with_the_stages(tmp_path):
    model, pipe = both(tmp_path, TIED)
    weights = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    pipe.load_state_dict(weights, assign=True)
    model.load_state_dict(weights)
    assert pipe.head.weight is pipe.embed.weight
    assert same(pipe(*TIED.inputs()), model(*TIED.inputs()))


def test_of_a_tied_weight_one_name_is_enough_to_assign_it(tmp_path):
    model, pipe = both(tmp_path, TIED)
    weight = model.head.weight.detach() * 3
    for name in ("embed.weight", "head.weight"):
        weight = weight * 2
        result = pipe.load_state_dict({name: weight}, strict=False, assign=True)
        assert name not in result.missing_keys
        assert pipe.head.weight is pipe.embed.weight
        assert torch.equal(pipe.head.weight, weight)
    model.load_state_dict({"head.weight": weight}, strict=False)
    assert same(pipe(*TIED.inputs()), model(*TIED.inputs()))


def test_a_tied_weight_that_is_assigned_two_values_is_refused_before_any_is_loaded(tmp_path):
    model, pipe = both(tmp_path, TIED)
    before = copy.deepcopy(pipe.state_dict())
    weights = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    weights["head.weight"] = weights["head.weight"] * 3
    with pytest.raises(WeightsError, match=r"'head.weight' and 'embed.weight' are one") as error:
        pipe.load_state_dict(weights, assign=True)
    assert "compile it again" in str(error.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in pipe.state_dict().items())
    assert same(pipe(*TIED.inputs()), model(*TIED.inputs()))


def test_saved_values_of_buffers_are_loaded(tmp_path):
    both(tmp_path, NORMED)
    torch.save({"bn.running_mean": torch.full((8,), 3.0)}, tmp_path / "buffers.pt")
    pipe = load(tmp_path)
    assert torch.equal(pipe.bn.running_mean, torch.full((8,), 3.0, dtype=torch.float64))


def test_a_copy_is_a_pipeline_of_its_own(tmp_path):
    _, pipe = both(tmp_path, EARLY)
    x = EARLY.inputs()
    pipe.step(*x, loss_fn=mean_loss)
    other = copy.deepcopy(pipe)
    other.zero_grad()
    with torch.no_grad():
        other.a.weight.zero_()
    assert not same(other(*x)["aux"], pipe(*x)["aux"])
