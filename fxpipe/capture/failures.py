"""Failures of tracing, told in the user's words."""

import re
from collections.abc import Mapping, Sequence
from traceback import FrameSummary

from fxpipe.capture.places import parse_stack, place_of, place_text, user_frame, user_place
from fxpipe.turned import turned

PYTHON_DRAWS = (
    "forward draws numbers from Python's random module, of which no stage can be made: draw them "
    "with torch, as torch.rand(()), which a pipeline seeds for each micro-batch"
)

# In hints on how to change torch, not the model.
_ABOUT_TORCH = ("torch._dynamo", "torch.compiler", "PyTorch")

# Of what torch.func makes of a tensor.
_IN_A_TRANSFORM = ("functorch transform", "data pointer of Tensor that doesn't have storage")

ELSEWHERE = (
    "write what it does with ops of torch on whole tensors, or keep that module outside the "
    "pipelined model, as --allow-graph-breaks does"
)


# Ops of which torch traces steps that count the rows, and what is written with others.
_COUNTING_ROWS = {
    "take_along_dim": "torch.gather, the index expanded to the other dimensions",
    "gradient": "the differences of slices, or torch.diff",
    "kron": "torch.einsum and a reshape",
    "multi_dot": "the products one by one, by @",
    "chain_matmul": "the products one by one, by @",
    "block_diag": "torch.cat of blocks that are padded (F.pad)",
}


def transforms_a_function(place: str) -> str:
    """That forward calls torch.func at `place`."""
    return (
        f"forward transforms a function by torch.vmap or torch.func ({place}), of which no stage "
        f"can be made: {ELSEWHERE}"
    )


def numpy_arrays(place: str) -> str:
    """That numpy's arrays are computed with at `place`."""
    return (
        f"forward computes with arrays of numpy ({place}): make what it needs before, as buffers "
        "(torch.from_numpy), or as numbers by int() or float()"
    )


def frozen_batch(
    stack: Sequence[FrameSummary], batch: int, whole: Mapping[str, Sequence[int]]
) -> str:
    """That the trace holds for the batch of `batch` rows alone, because of the line at `stack`.

    `whole` are the shapes of inputs that go whole to each micro-batch.
    """
    op = _counting_rows(stack)
    if op is not None:
        return (
            f"torch traces {op} for one batch size only, {place_of(stack)}\n"
            "A pipeline cuts the batch into micro-batches: write it with ops that are traced for "
            f"any number of rows, here {_COUNTING_ROWS[op]}.\n"
            "With --allow-graph-breaks the model's largest part without it is pipelined."
        )
    message = (
        f"forward works for one batch size only, {place_of(stack)}\n"
        "A pipeline cuts the batch into micro-batches: write x.size(0) in place of the number, "
        "which may not come from values of tensors either (`tolist`, `item`); and ops on all rows "
        "in place of a loop over them or a list of them (`list(x)`).\n"
        f"The batch is taken to be {batch}, dimension 0 of the first input with more than one row. "
        "If that input has no batch, give it last, by name.\n"
        "Where forward runs on other batches all the same, as with such a loop, "
        "--allow-graph-breaks pipelines the model's largest part without that line."
    )
    return "\n".join([message, *turned(whole, batch)])


def _counting_rows(stack: Sequence[FrameSummary]) -> str | None:
    """The op in the user's line that torch can't trace for another number of rows, if one is."""
    frame = user_frame(stack)
    called = re.findall(r"(?<!self\.)\b(\w+)\(", (frame.line if frame else None) or "")
    return next((name for name in called if name in _COUNTING_ROWS), None)


def unsupported(error: Exception) -> str:
    """What in the model an error of tracing is about, where, and what to do."""
    frame = user_frame(getattr(error, "real_stack", None) or parse_stack(str(error)))
    if not str(error):
        return (
            f"the model can't be captured as one graph: tracing it raised {type(error).__name__}, "
            f"{user_place(error)}\nTracing may call what a plain forward doesn't. "
            "With --allow-graph-breaks the model's largest part without it is pipelined."
        )
    if "trace_autograd_ops" in str(error):  # of torch's settings, which hints would tell to change
        return (
            f"forward computes gradients itself, {place_text(frame)}\n"
            "They go back through all that came before, of which a stage has but its part: let the "
            "loss compute them, or a model around the pipeline."
        )
    if any(words in str(error) for words in _IN_A_TRANSFORM):
        return transforms_a_function(place_text(frame))
    if "<unknown module>.Random." in str(error):
        return f"{PYTHON_DRAWS}\nIt does, {place_text(frame)}"
    _, _, operator = str(error).partition("unsupported operator: ")
    if operator:
        return (
            f"torch can't trace the operator {operator.split()[0]} with an open batch, "
            f"{place_text(frame)}\n"
            "It can't tell the shape of the result: write it with operators that it can trace, in "
            "a custom autograd.Function if its gradient is not theirs.\n"
            "With --allow-graph-breaks the model's largest part without it is pipelined."
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("Explanation:")] or lines[:1]
    _, raised, exception = str(error).partition("context: raised exception ")
    reasons += [f"Tracing it raised {exception.splitlines()[0]}"] if raised else []
    hints = [
        line
        for line in lines
        if line.startswith("Hint:") and not any(word in line for word in _ABOUT_TORCH)
    ]
    way_out = "With --allow-graph-breaks the model's largest part without it is pipelined."
    if "data-dependent" in str(error).lower():
        way_out = (
            "A pipeline needs a forward whose path does not depend on the values of its tensors: "
            "with --allow-graph-breaks it is made of the model's largest part that has one."
        )
    failed = f"the model can't be captured as one graph, {place_text(frame)}"
    return "\n".join([failed, *reasons, *hints[:2], way_out])
