"""Where tensors and constants sit in a structure."""

import torch
from models import Answer, Cache

from fxpipe.runtime.leaves import constants, in_mode, leaves, renumbered
from fxpipe.runtime.structure import describe, rebuild


def test_each_tensor_has_a_path_and_a_number():
    x = torch.zeros(2)
    structure, _ = describe({"a": Answer(x, (x, None)), "b": [x]})
    assert leaves(structure["dict"]["a"]) == [(".logits", 0), (".hidden[0]", 1)]
    assert leaves(structure) == [("['a'].logits", 0), ("['a'].hidden[0]", 1), ("['b'][0]", 2)]


def test_a_structure_may_depend_on_the_mode():
    both = {"train": {"tuple": [{"tensor": 0}]}, "eval": {"list": [{"tensor": 1}]}}
    assert rebuild(in_mode(both, training=True), [1, 2]) == (1,)
    assert rebuild(in_mode(both, training=False), [1, 2]) == [2]
    assert in_mode({"tensor": 0}, training=False) == {"tensor": 0}


def test_tensors_can_be_numbered_anew():
    structure, _ = describe((torch.zeros(1), 0, Cache(), {0: torch.zeros(1)}))
    again = renumbered(structure, [5, 4])
    assert [number for _, number in leaves(again)] == [5, 4]
    assert again["tuple"][1] == {"constant": 0}


def test_constants_have_paths_too():
    structure, _ = describe({"a": (1, torch.zeros(1)), "b": {0: None}})
    assert constants(structure) == [("['a'][0]", 1), ("['b'][0]", None)]
