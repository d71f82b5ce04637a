"""The frame that Dynamo traces as it calls a backend: whose code it is, what broke it, once more.

Private to torch, all of it: tests/test_private.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import InstructionTranslator

from fxpipe.capture.inputs import batch_of
from fxpipe.capture.places import place_of
from fxpipe.errors import CaptureError


def root_module() -> nn.Module | None:
    """The module whose code is traced, or that it is about; None if there is none."""
    held: dict[str, Any] = InstructionTranslator.current_tx().output.root_tx.f_locals
    # Torch calls its own modules in a function of its own that holds them.
    modules = [value for value in held.values() if isinstance(value, nn.Module)]
    first = held.get("self", next(iter(modules), None))
    return first if isinstance(first, nn.Module) else None


def graph_break() -> str | None:
    """Why and where in the user's code the graph ends before the frame does, if it does."""
    reason = InstructionTranslator.current_tx().output.compile_subgraph_reason
    if not reason.graph_break:
        return None
    return f"{place_of(reason.user_stack)}\n{reason.reason.strip().splitlines()[0]}"


def again_with_open_batch(inputs: Sequence[Tensor]) -> None:
    """Make Dynamo trace the frame once more, with the batch a symbol and all other sizes numbers.

    Does not return. Raises CaptureError if it has traced it so already.
    """
    if all(hasattr(tensor, "_dynamo_static_indices") for tensor in inputs):
        raise CaptureError(
            "forward works for one batch size only: a pipeline cuts the batch into micro-batches, "
            "so write x.size(0) in place of a number; and call it with two rows or more at first"
        )
    _, batched = batch_of(inputs)
    for tensor, is_batched in zip(inputs, batched, strict=True):
        static = set(range(tensor.dim()))
        if is_batched:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one symbol for equal sizes
            static.remove(0)
        # As `mark_static` does, which inside of a backend would mean something else.
        tensor._dynamo_static_indices = static  # type: ignore[attr-defined]
        tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]
    InstructionTranslator.current_tx().speculation_log.clear()
    # The one kind of restart that a backend may ask for.
    raise TensorifyScalarRestartAnalysis
