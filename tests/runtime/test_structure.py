"""What goes into and comes out of a model, as data and back."""

import json
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from models import Answer, Cache

from fxpipe.errors import InputError
from fxpipe.runtime.structure import describe, rebuild, tensors_of

Pair = namedtuple("Pair", "first second")


def through_json(value):
    structure, tensors = describe(value)
    return json.loads(json.dumps(structure)), tensors


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, None, True, "text", 0.5), "b": [[], (), {}]},
        {0: True, 7: {"nested": False}},
        Pair(3, [None]),
        (torch.float32, torch.nn.Linear),
    ],
)
def test_whatever_holds_no_tensor_comes_back_as_it_was(value):
    structure, tensors = through_json(value)
    assert tensors == []
    assert rebuild(structure, []) == value


def test_tensors_come_back_in_their_places():
    x, y = torch.zeros(2), torch.ones(3)
    answer = Answer(x, (x, y))
    structure, tensors = through_json(answer)
    assert [id(tensor) for tensor in tensors] == [id(x), id(x), id(y)]
    assert tensors_of(structure, answer) == tensors
    again = rebuild(structure, tensors)
    assert type(again) is Answer
    assert again.logits is x
    assert again.hidden[1] is y


def test_an_object_is_made_of_its_attributes():
    cache = Cache()
    cache.update(0, torch.zeros(2, 3))
    structure, tensors = through_json({"past": cache})
    assert tensors_of(structure, {"past": cache}) == tensors
    again = rebuild(structure, tensors)["past"]
    assert type(again) is Cache
    assert vars(again) == vars(cache)


def test_an_objects_dtype_is_that_of_the_tensors_it_gets():
    cache = Cache()
    cache.update(0, torch.zeros(2, 3))
    structure, _ = describe(cache)
    assert rebuild(structure, [torch.zeros(1, dtype=torch.float64)]).dtype == torch.float64


def test_a_class_that_is_not_here_becomes_a_namespace():
    structure, tensors = describe(Cache())
    structure["object"] = "nowhere:Cache"
    assert rebuild(structure, tensors) == SimpleNamespace(**vars(Cache()))


class Slotted:
    __slots__ = ("x",)


class Reduced:
    def __reduce__(self):
        return (Reduced, ())


class Callable:
    def __call__(self):
        """Could do anything."""


@pytest.mark.parametrize(
    "value", [Slotted(), Reduced(), Callable(), torch.nn.Linear(1, 1), {1, 2}, {"x": object()}]
)
def test_objects_that_are_more_than_their_attributes_are_refused(value):
    with pytest.raises(InputError, match="can't be passed through a pipeline"):
        describe(value)


def test_an_object_that_holds_itself_is_refused():
    cache = Cache()
    cache.parent = [cache]
    with pytest.raises(InputError, match="holds itself"):
        describe(cache)
