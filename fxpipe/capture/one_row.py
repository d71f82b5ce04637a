"""Does the graph hold for one row? Tracing takes for granted that a batch has two or more."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from fxpipe.capture.check import Check
from fxpipe.capture.sizes import Sizes, resized
from fxpipe.errors import CaptureError, InputError

# What a call must meet where it does not.
CONDITION = "batch > 1"


def holds_for_one_row(check: Check, tensors: Sequence[Tensor], sizes: Sizes) -> bool:
    """Whether the graph computes what the model does, or the model by itself takes no single row.

    `tensors` are the inputs that were traced, whose sizes are `sizes`, and `check` has passed.
    """
    one = resized(tensors, sizes, {**sizes.values, "batch": 1})
    try:
        replace(check, inputs=one).run()
    except InputError:  # it will say so itself, as batch norm does
        return True
    except (CaptureError, RuntimeError, ValueError, IndexError):
        return False
    return True
