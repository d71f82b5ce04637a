"""Sizes are read off the tensors at hand, as a person would."""

from fxpipe.codegen.sizes import size_lines
from fxpipe.runtime.manifest import TensorSpec

ROWS = ("rows", TensorSpec((3, "4 * batch"), "float32"))
IDS = ("ids", TensorSpec(("batch", "length"), "int64"))
STATES = ("states", TensorSpec(("batch", "length", 64), "float32"))
MASK = ("mask", TensorSpec(("batch", 1, "length", "length"), "bool"))


def test_a_tensor_that_tells_several_is_unpacked():
    assert size_lines(["batch", "(4*batch, length)"], [IDS]) == ["batch, length = ids.shape"]
    assert size_lines(["batch", "length"], [STATES]) == ["batch, length, _ = states.shape"]


def test_one_size_is_read_by_its_dimension():
    assert size_lines(["2*length"], [IDS, STATES]) == ["length = ids.size(1)"]


def test_a_dimension_that_stands_twice_is_read_once():
    lines = size_lines(["batch", "length"], [MASK])
    assert lines == ["batch = mask.size(0)", "length = mask.size(2)"]


def test_a_size_is_read_undivided_if_possible():
    assert size_lines(["batch"], [ROWS]) == ["batch = rows.size(1) // 4"]
    assert size_lines(["batch"], [ROWS, STATES]) == ["batch = states.size(0)"]


def test_other_words_are_no_sizes():
    assert size_lines(["self.training", "torch.finfo(dtype).min", "batches"], [IDS]) == []
