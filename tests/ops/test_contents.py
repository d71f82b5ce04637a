"""What modules hold in containers and objects is seen to change, and put back."""

from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fxpipe.ops.contents import Contents, attributes, mark


class Stubborn(dict):
    """A dict whose own methods do something else."""

    def items(self):
        return [(None, None)]

    def clear(self):
        raise NotImplementedError


class Friend:
    """One of many that know each other."""

    def __init__(self):
        self.all = []


def friends(n):
    made = [Friend() for _ in range(n)]
    for one in made:
        one.all = made
    return made


def change(value, new):
    if isinstance(value, dict):
        value["k"] = new
    elif isinstance(value, set):
        value.add(new)
    elif isinstance(value, list | deque):
        value.append(new)
    else:
        value.k = new


KINDS = {
    "list": list,
    "deque": lambda: deque(maxlen=2),
    "dict": dict,
    "ordered": OrderedDict,
    "default": lambda: defaultdict(list),
    "set": set,
    "stubborn": Stubborn,
    "namespace": SimpleNamespace,
    "object": Friend,
}


def marks(model):
    return {one.name: mark(one.value, one.package) for one in attributes(model)}


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_change_is_seen_and_undone(kind, depth):
    model = nn.Linear(2, 2)
    model.__class__ = type("Own", (nn.Linear,), {"__module__": __name__})
    held = kind()
    model.held = held
    for _ in range(depth):
        model.held = [model.held]
    before, contents = marks(model), Contents(model, {})
    for _ in range(2):
        change(held, torch.zeros(1))
        assert marks(model) != before
        contents.put_back()
        assert marks(model) == before


def test_tensors_have_their_values_and_sizes_again():
    model, kept, grown = nn.Linear(2, 2), torch.zeros(2), torch.zeros(0)
    model.held = [kept, {"k": grown}, model.weight]
    contents = Contents(model, dict(model.named_parameters()))
    kept.add_(1)
    grown.resize_(3)
    contents.put_back()
    assert torch.equal(kept, torch.zeros(2))
    assert grown.shape == (0,)


def test_an_ordered_dict_has_its_order_again():
    model = nn.Linear(2, 2)
    model.held = OrderedDict(a=1, b=2)
    before, contents = marks(model), Contents(model, {})
    for _ in range(2):
        model.held["c"] = 3
        model.held.popitem(last=False)
        model.held.move_to_end("b")
        assert marks(model) != before
        contents.put_back()
        assert [*model.held] == ["a", "b"]
        assert marks(model) == before


def test_what_many_know_is_looked_into_once():
    model = nn.Linear(2, 2)
    model.__class__ = type("Own", (nn.Linear,), {"__module__": __name__})
    model.held = friends(50)
    before, contents = marks(model), Contents(model, {})
    model.held[-1].name = "another"
    assert marks(model) != before
    contents.put_back()
    assert marks(model) == before
