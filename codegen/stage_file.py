"""One stage as a module: what its template lays out, line by line."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from fxpipe.codegen.body import Body, Line, names_device, reads
from fxpipe.codegen.constructor import Constructor, construct
from fxpipe.codegen.functions import functions_imported
from fxpipe.codegen.names import local_names, path, plain
from fxpipe.codegen.sizes import size_lines
from fxpipe.ir import Capture, Port, StageWiring


@dataclass(frozen=True, slots=True)
class StageFile:
    """The template's fields of one stage, and what plan.json says of its forward and state."""

    fields: dict[str, object]
    parameters: tuple[str, ...]
    constructor: Constructor


_CONDITION = {
    "both": "",
    "train": " if self.training else None",
    "eval": " if not self.training else None",
}


def stage_file(capture: Capture, wiring: StageWiring, j: int, n: int) -> StageFile:
    """Decide every line of stage `j` of `n`."""
    wanted = set(wiring.ops)
    ops = {node.name: node for node in capture.graph.nodes if node.name in wanted}
    nodes = [ops[name] for name in wiring.ops]
    made = construct(capture, nodes)
    names = local_names(nodes, [port.value for port in wiring.inputs], wiring.outputs)
    parameters = tuple(names[port.value] for port in wiring.inputs)

    lines = list(Body(capture, nodes, names, wiring.outputs, made.dicts).lines())
    if not str(lines[0]):  # between groups stands a blank line, before the first none
        lines = lines[1:]
    always = [port for port in wiring.inputs if capture.mode(port.value) == "both"]
    body = [*_opening(capture, nodes, always, names, made), *lines]
    results = [names[value] + _CONDITION[capture.mode(value)] for value in wiring.outputs]
    body.append(Line(f"return {', '.join(results) or '()'}"))
    takes = [f"{names[port.value]}: {_kind(capture, port.value)}" for port in wiring.inputs]
    kinds = ", ".join(_kind(capture, value) for value in wiring.outputs) or "()"
    code = "\n".join([*made.lines, *(line.code for line in body)])
    fields: dict[str, object] = {
        "j": j,
        "n": n,
        "model": capture.model_name,
        "class_name": f"Stage{j}",
        "summary": _summary(capture, nodes),
        "takes": [_take(capture, port, names) for port in wiring.inputs],
        "returns": [f"Returns {names[value]}: {capture.specs[value]}" for value in wiring.outputs],
        "imports": _imports(code, typed=bool(parameters or results)),
        "own_imports": functions_imported(capture, code),
        "constructor": made.lines,
        "signature": ", ".join(["self", *takes]),
        "result": kinds if len(results) == 1 else f"tuple[{kinds}]",
        "body": [text for line in body for text in str(line).split("\n")],
    }
    return StageFile(fields, parameters, made)


def _opening(
    capture: Capture,
    nodes: Sequence[fx.Node],
    inputs: Sequence[Port],
    names: dict[str, str],
    made: Constructor,
) -> Iterator[Line]:
    """What the ops need to know of the inputs: batch size, dtype, device."""
    literals = [capture.literals.get(v.name, "") for node in nodes for v in reads(node)]
    given = [(names[port.value], capture.specs[port.value]) for port in inputs]
    yield from map(Line, size_lines(literals, given))
    if any(re.search(r"\bdtype\b", text) for text in literals):
        yield Line(f"dtype = {_dtype(capture, inputs, names, made)}")
    if any(names_device(node) for node in nodes):
        device = f"{given[0][0]}.device" if given else 'torch.device("cpu")'
        yield Line(f"device = {device}")


def _dtype(
    capture: Capture, inputs: Sequence[Port], names: dict[str, str], made: Constructor
) -> str:
    """The model's own dtype, read off a parameter of the stage or else off an input."""
    for name in made.parameters:
        if capture.state[name].dtype == capture.dtype:
            return f"{path(name, made.dicts)}.dtype"
    for port in inputs:
        if capture.specs[port.value].torch_dtype == capture.dtype:
            return f"{names[port.value]}.dtype"
    return "torch.get_default_dtype()"


def _kind(capture: Capture, value: str) -> str:
    return "Tensor" if capture.mode(value) == "both" else "Tensor | None"


def _summary(capture: Capture, nodes: Sequence[fx.Node]) -> str:
    count = "1 op" if len(nodes) == 1 else f"{len(nodes)} ops"
    named = [m for m in (capture.ops[node.name].module for node in nodes) if m]
    if not named:
        return f"{count}."
    within = f"in {named[0]}" if named[0] == named[-1] else f"from {named[0]} to {named[-1]}"
    return plain(f"{count}, {within}.")


def _take(capture: Capture, port: Port, names: dict[str, str]) -> str:
    if port.source is None:
        origin = "the caller"
    else:
        origin = f"stage {port.source}" + (" (portal)" if port.portal else "")
    return f"Takes {names[port.value]}: {capture.specs[port.value]} from {origin}"


def _imports(code: str, typed: bool) -> list[str]:
    def used(name: str) -> bool:
        return re.search(rf"(?<![\w.]){name}\.", code) is not None

    lines = [f"import {name}" for name in ("math", "operator") if used(name)]
    lines += [""] * bool(lines)  # the standard library stands apart
    lines += ["import torch"] * used("torch")
    lines.append("from torch import Tensor, nn" if typed else "from torch import nn")
    if used("F"):
        lines.append("from torch.nn import functional as F")
    return lines
