"""An optimizer's state is kept under the original names of what it trains."""

import pytest
import torch
import toys
from torch import Tensor, nn

import fxpipe
from fxpipe import checkpoint
from fxpipe.errors import WeightsError
from fxpipe.runtime import load
from fxpipe.runtime.microbatch import map_tensors


def test_an_optimizer_of_fewer_parameters_keeps_their_names(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    optimizer = torch.optim.AdamW(pipe.named_parameters(), 0.05)
    fxpipe.checkpoint.save(tmp_path / "last", pipe, optimizer)
    last = [(name, p) for name, p in pipe.named_parameters() if "last" in name]
    fewer = torch.optim.AdamW(last, 1.0)
    fxpipe.checkpoint.load(tmp_path / "last", pipe, fewer)
    (group,) = fewer.param_groups
    assert (group["lr"], group["param_names"]) == (0.05, [name for name, _ in last])


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"team/{k}": nn.Linear(3, 3) for k in range(3)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def test_a_parameters_name_may_have_any_character_but_a_dot_in_it(tmp_path):
    x = torch.randn(8, 3)
    folder = fxpipe.compile(Adapters(), (x,), devices=2, microbatches=4).write(tmp_path / "out")
    pipe, again = fxpipe.load(folder), fxpipe.load(folder)
    pipe.step(x, target=x, loss_fn=nn.functional.mse_loss)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (pipe, again)]
    optimizers[0].step()
    checkpoint.save(tmp_path / "last", pipe, optimizers[0])
    checkpoint.load(tmp_path / "last", again, optimizers[1])
    saved, loaded = ([*optimizer.state.values()] for optimizer in optimizers)
    assert [map_tensors(Tensor.tolist, each) for each in loaded] == [
        map_tensors(Tensor.tolist, each) for each in saved
    ]


def test_what_is_not_there_or_not_the_pipelines_is_named(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    path = tmp_path / "last"
    fxpipe.checkpoint.save(path, pipe)
    optimizer = torch.optim.AdamW(pipe.parameters())
    with pytest.raises(WeightsError, match=r"no optimizer state of 8 parameters: body.stages.bias"):
        fxpipe.checkpoint.load(path, pipe, optimizer)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(WeightsError, match=r"a parameter of shape \[2\]"):
        fxpipe.checkpoint.save(path, pipe, foreign)


class Preconditioned(torch.optim.Optimizer):
    """Keeps a tensor, a list with one for each dimension, and a dict, as SOAP and others do."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad, self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
                state["squares"] = [torch.zeros_like(parameter), (parameter.new_zeros(3), 3)]
                state["seen"] = {"steps": 0, "largest": parameter.new_zeros(())}
            state["mean"].lerp_(gradient, 0.1)
            state["squares"][0].lerp_(gradient**2, 0.1)
            state["seen"]["steps"] += 1
            state["seen"]["largest"].copy_(gradient.abs().max())
            parameter -= 0.05 * state["mean"]


def plain(node: object) -> object:
    if isinstance(node, Tensor):
        return node.tolist()
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    return type(node)(map(plain, node)) if isinstance(node, tuple | list) else node


def test_tensors_in_lists_tuples_and_dicts(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    optimizer = Preconditioned(pipe.parameters())
    toys.mean_loss(pipe(*toys.CHAIN.inputs())).backward()
    optimizer.step()
    fxpipe.checkpoint.save(tmp_path / "last", pipe, optimizer)
    again = load(tmp_path).double()
    resumed = Preconditioned(again.parameters())
    fxpipe.checkpoint.load(tmp_path / "last", again, resumed)
    before, after = optimizer.state_dict()["state"], resumed.state_dict()["state"]
    assert plain(before) == plain(after)


class Lookahead(torch.optim.Optimizer):
    """Has a state of its own beside that of the optimizer that takes the steps."""

    def __init__(self, parameters) -> None:
        self.fast = torch.optim.AdamW(parameters)
        super().__init__(self.fast.param_groups, {})


def test_an_optimizer_with_another_in_it_is_refused(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    path, optimizer = tmp_path / "last", Lookahead(pipe.parameters())
    with pytest.raises(WeightsError, match=r"written: Lookahead keeps .* train by AdamW itself"):
        fxpipe.checkpoint.save(path, pipe, optimizer)
    assert not path.exists()
    fxpipe.checkpoint.save(path, pipe, optimizer.fast)
    with pytest.raises(WeightsError, match=r"loaded: Lookahead keeps .* train by AdamW itself"):
        fxpipe.checkpoint.load(path, pipe, optimizer)


def test_another_kind_of_optimizer_loads_nothing(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    path = tmp_path / "last"
    fxpipe.checkpoint.save(path, pipe, torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9))
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(pipe.parameters())
    with pytest.raises(WeightsError, match="that was saved is SGD, this one is AdamW"):
        fxpipe.checkpoint.load(path, pipe, optimizer)
    assert not any(parameter.any() for parameter in pipe.parameters())


def test_a_group_of_parameters_with_different_settings_is_told_of(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    first, *others = pipe.parameters()
    groups = [{"params": [first], "lr": 1.0}, {"params": others, "lr": 0.001}]
    fxpipe.checkpoint.save(tmp_path / "last", pipe, torch.optim.SGD(groups))
    joined = torch.optim.SGD([*others, first], 0.5)
    with pytest.raises(WeightsError, match=r"in one group .* saved with lr 0\.001 and 1\.0"):
        fxpipe.checkpoint.load(tmp_path / "last", pipe, joined)
    apart = torch.optim.SGD([{"params": others[:2]}, {"params": others[2:]}, {"params": [first]}])
    fxpipe.checkpoint.load(tmp_path / "last", pipe, apart)
    assert [group["lr"] for group in apart.param_groups] == [0.001, 0.001, 1.0]


def test_a_group_without_parameters_gets_what_stood_in_its_place(tmp_path, monkeypatch):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    first, *others = pipe.parameters()

    def loaded(path, *groups):
        optimizer = torch.optim.SGD([{"params": group} for group in groups], 0.5)
        fxpipe.checkpoint.load(path, pipe, optimizer)
        return [group["lr"] for group in optimizer.param_groups]

    groups = [{"params": [first], "lr": 1.0}, {"params": others}, {"params": [], "lr": 3.0}]
    saving = torch.optim.SGD(groups, 2.0)
    fxpipe.checkpoint.save(tmp_path / "last", pipe, saving)
    assert loaded(tmp_path / "last", [], others, []) == [1.0, 2.0, 3.0]
    assert loaded(tmp_path / "last", [first], [], others) == [1.0, 2.0, 2.0]
    assert loaded(tmp_path / "last", [], others) == [0.5, 2.0]  # places of others
    whole = checkpoint.optimizer_state

    def before(*args):
        return {key: value for key, value in whole(*args).items() if not key.startswith("..")}

    monkeypatch.setattr(checkpoint, "optimizer_state", before)
    fxpipe.checkpoint.save(tmp_path / "before", pipe, saving)
    assert loaded(tmp_path / "before", [first], others, []) == [1.0, 2.0, 0.5]
