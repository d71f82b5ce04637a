"""One trace of the model, for all sizes, dtypes and modes that it can be for, and checked."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.capture.assigned import copy_what_is_kept, write_back
from fxpipe.capture.calls import CallCheck
from fxpipe.capture.check import Check, Checked
from fxpipe.capture.dtypes import open_dtypes, share_reads
from fxpipe.capture.dynamo import FlatModel, dynamo_graph
from fxpipe.capture.functions import Functions
from fxpipe.capture.graph import own_graph
from fxpipe.capture.mixed_rows import mixed_rows
from fxpipe.capture.modes import depends_on_mode, forget_eval, merge_modes
from fxpipe.capture.multiples import write_multiples
from fxpipe.capture.names import ModelNames, model_names
from fxpipe.capture.other_rows import compare_elsewhere
from fxpipe.capture.region import Region
from fxpipe.capture.rows import with_rows_known
from fxpipe.capture.simplify import simplify
from fxpipe.capture.sizes import Sizes, describe_sizes, together
from fxpipe.capture.stock_calls import call_stock_modules
from fxpipe.errors import CaptureError
from fxpipe.memory import faked, lacks_memory
from fxpipe.ops.interpret import untouched
from fxpipe.runtime.microbatch import why_unmergeable
from fxpipe.runtime.structure import Structure


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph that the numeric check has passed, and what was found on the way.

    `mixed` says where forward mixes rows of the batch, if it does.
    """

    graph: fx.Graph
    modules: dict[str, nn.Module]
    names: ModelNames
    functions: Functions
    sizes: Sizes
    outputs: Structure
    found: Checked
    evaluates: bool
    in_one_dtype: bool
    mixed: str


def trace_open(flat: FlatModel, *rest: Any) -> Traced:
    """`_trace` with other sizes left open, if that is possible.

    Not if then alone nobody knows how many rows an output has, as of `x.view(-1, 4, 6)` where a
    length of 4 could be 8 as well. Raises CaptureError.
    """
    found = None
    if not isinstance(flat.model, Region):
        # Else the model is too much for symbols, or is wrong: the next one tells.
        with contextlib.suppress(Exception):
            found = _trace(flat, *rest, free=True)
    if found is not None and (len(found.sizes.values) == 1 or _rows_are_known(found)):
        return found
    fixed = _trace(flat, *rest, free=False)
    return fixed if found is None or _rows_are_known(fixed) else found


def _rows_are_known(traced: Traced) -> bool:
    values = traced.graph.output_node().args[0]
    assert isinstance(values, tuple)
    specs = [value.meta.get("spec") for value in values if isinstance(value, fx.Node)]
    return not any(spec and why_unmergeable(spec) for spec in specs)


def _trace(
    flat: FlatModel,
    names: ModelNames,
    tensors: Sequence[Tensor],
    batched: Sequence[bool],
    inputs: Sequence[str],
    *,
    free: bool,
) -> Traced:
    """Trace in train mode, and where needed in another dtype and in eval mode; then check.

    If `free`, all sizes of inputs are left open that the model leaves open. Raises CaptureError,
    then also if the graph does not hold for other sizes.
    """
    model, outputs = flat.model, flat.outputs
    memoryless = lacks_memory(model)
    names, functions = names.copy(), Functions()
    sizes: list[Sizes] = []
    written: set[str] = set()

    def trace(flat: FlatModel, tensors: Sequence[Tensor]) -> tuple[fx.Graph, dict[str, nn.Module]]:
        with faked(flat) if memoryless else contextlib.nullcontext():
            own = flat.model is model and not memoryless
            own_names = names if own else model_names(flat.model)
            found = dynamo_graph(flat, tensors, batched, free=free)
            graph = own_graph(found, own_names, inputs, functions)
            copy_what_is_kept(graph, written)
            write_back(graph, flat.assigned[flat.training], own_names.state)
        if flat.model is model:
            names.add_constants_of(own_names)
        sizes.append(describe_sizes(graph, tensors, batched))
        if sizes[-1].shapes != sizes[0].shapes:
            raise CaptureError("another dtype or mode leaves other sizes open")
        modules = call_stock_modules(graph, flat.model)
        share_reads(graph, flat)
        return graph, modules

    with untouched(model, names.state):
        flat.train()
        graph, modules = trace(flat, tensors)
        in_one_dtype = open_dtypes(graph, flat, modules, names.state, tensors, trace)
        if "eval" in outputs:
            more, outputs = merge_modes(graph, flat, tensors, trace)
            modules.update(more)
    kind = CallCheck if memoryless else Check
    here = kind(flat, graph, modules, names.state, tensors, outputs)
    compared = compare_elsewhere(here, sizes[0], inputs, batched)
    check, found, step = compared.check, compared.found, compared.step
    by_mode = "eval" not in flat.outputs and (
        not found.identical_in_eval or (not memoryless and depends_on_mode(graph, found.ops))
    )
    if by_mode:
        with untouched(model, names.state):
            modules.update(merge_modes(graph, flat, tensors, trace)[0])
    # What ops write is known only where they ran on real data.
    if (not memoryless and simplify(graph, found.ops)) or by_mode:
        found = check.run()
    evaluates = found.agrees_in_eval and ("eval" in outputs) == ("eval" in flat.outputs)
    if len(sizes[0].values) > 1 and not evaluates:
        raise CaptureError("eval mode may not leave open what train mode does")
    if not evaluates:
        outputs = forget_eval(graph, outputs)
    if step > 1:
        write_multiples(graph, step)
    check = replace(check, outputs=outputs)
    known = with_rows_known(together(sizes), check, found, tensors, step)
    return Traced(
        graph,
        modules,
        names,
        functions,
        known,
        outputs,
        found,
        evaluates,
        in_one_dtype,
        mixed_rows(check, known, batched, step) if isinstance(check, Check) and evaluates else "",
    )
