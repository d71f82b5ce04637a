"""Sizes are read off what somebody is given, under names of their own."""

import pytest

from fxpipe.ops.local_sizes import local_sizes
from fxpipe.runtime.manifest import TensorSpec

IMAGE = TensorSpec(("batch", 4, "height", "width"), "float32")
HALF = TensorSpec(("batch", 8, "(height - 1) // 2 + 1", "(width - 1) // 2 + 1"), "float32")
TOKENS = TensorSpec(("batch * length", 32), "float32")
STATES = TensorSpec(("batch", "length_2", 32), "float32")


@pytest.mark.parametrize(
    ("given", "text", "local"),
    [
        ([IMAGE], "height * width", "height * width"),
        ([HALF], "((height - 1) // 2 + 1) * ((width - 1) // 2 + 1)", "height * width"),
        ([HALF], "(batch, (height - 1) // 2 + 1, -1)", "(batch, height, -1)"),
        ([HALF, IMAGE], "height", "height_2"),
        ([HALF], "(height - 1) // 8 + 1", "(height - 1) // 4 + 1"),
        ([HALF], "((height - 1) // 4 + 2) // 3", "((height - 1) // 2 + 2) // 3"),
        ([HALF], "(height - 1) // 2", "height - 1"),
        ([HALF], "(height - 1) // 3", None),
        ([TOKENS], "2 * batch * length", "2 * rows"),
        ([TOKENS], "batch * length // 4", "rows // 4"),
        ([STATES], "length_2 + 1", "length + 1"),
        ([STATES], "torch.finfo(dtype).min", "torch.finfo(dtype).min"),
    ],
)
def test_an_expression_in_local_names(given, text, local):
    assert local_sizes(given).text(text) == local


def test_what_nothing_tells_is_missing():
    sizes = local_sizes([HALF])
    assert sizes.text("height * batch") is None
    assert sizes.missing("height * batch") == ("height",)
    assert local_sizes([IMAGE]).missing("height * length") == ("length",)


def test_a_multiple_tells_a_size_if_nothing_else_does():
    doubled = TensorSpec(("2 * batch", 3), "float32")
    assert local_sizes([doubled]).text("batch + 1") == "batch + 1"


def test_a_shape_in_local_names_says_what_is_unknown():
    known = local_sizes([STATES])
    assert str(known.spec(IMAGE)) == "float32[batch, 4, _, _]"
