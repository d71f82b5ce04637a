"""One stage as a module: what its template lays out, line by line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxpipe.codegen.constructor import Constructor, construct
from fxpipe.codegen.lines import Writer
from fxpipe.codegen.names import local_names, path
from fxpipe.ir import Capture, Op, Port, StageWiring


@dataclass(frozen=True, slots=True)
class StageFile:
    """The template's fields of one stage, and what plan.json says of its forward and state."""

    fields: dict[str, object]
    parameters: tuple[str, ...]
    constructor: Constructor


def stage_file(capture: Capture, wiring: StageWiring, j: int, n: int) -> StageFile:
    """Decide every line of stage `j` of `n`."""
    wanted = set(wiring.ops)
    ops = {node.name: node for node in capture.graph.nodes if node.name in wanted}
    nodes = [ops[name] for name in wiring.ops]
    made = construct(capture, nodes)
    names = local_names(nodes, [port.value for port in wiring.inputs], wiring.outputs)
    parameters = tuple(names[port.value] for port in wiring.inputs)

    def value(node: fx.Node) -> str:
        if node.name in names:
            return names[node.name]
        if node.name in capture.literals:
            return capture.literals[node.name]
        return path(str(node.target), made.dicts)

    device = f"{parameters[0]}.device" if parameters else 'torch.device("cpu")'
    writer = Writer(value, lambda name: path(name, made.dicts), device)
    read = {used.name for node in nodes for used in node.all_input_nodes} | {*wiring.outputs}
    body = list(_body(capture, nodes, writer, names, read))
    if _uses_batch(capture, nodes):
        body.insert(0, f"batch = {_batch(capture, wiring.inputs, names)}")
    results = [names[value] for value in wiring.outputs]
    body.append(f"return {', '.join(results) or '()'}")
    text = "\n".join([*made.lines, *body])
    fields: dict[str, object] = {
        "j": j,
        "n": n,
        "model": capture.model_name,
        "class_name": f"Stage{j}",
        "summary": _summary(capture, nodes),
        "takes": [_take(capture, port, names) for port in wiring.inputs],
        "returns": [f"Returns {names[value]}: {capture.specs[value]}" for value in wiring.outputs],
        "imports": _imports(text),
        "constructor": made.lines or ("pass",),
        "signature": ", ".join(["self", *(f"{name}: Tensor" for name in parameters)]),
        "result": "Tensor"
        if len(results) == 1
        else f"tuple[{', '.join(['Tensor'] * len(results))}]",
        "body": body,
    }
    return StageFile(fields, parameters, made)


def _body(
    capture: Capture,
    nodes: Sequence[fx.Node],
    writer: Writer,
    names: dict[str, str],
    read: set[str],
) -> Iterator[str]:
    """Lines in groups, each under the user's module and line; regions as `with` blocks."""
    heading, indent, opened = "", "", None
    for node in nodes:
        op = capture.ops[node.name]
        if heading != (heading := _heading(op, node)) and heading:
            yield f"{indent}# {heading}"
        if node.target is torch._C._set_grad_enabled:
            if opened is None:
                opened = node.args[0]
                yield f"{indent}with torch.{'enable_grad' if opened else 'no_grad'}():"
                indent += "    "
            elif node.args[0] is not opened:
                indent, opened = indent[4:], None
            continue
        if node.target is torch.amp.autocast_mode._enter_autocast:
            yield f"{indent}{_autocast(node, writer)}:"
            indent += "    "
            continue
        if node.target is torch.amp.autocast_mode._exit_autocast:
            indent = indent[4:]
            continue
        statement = writer.statement(node, names[node.name], node.name in read)
        *before, line = statement.splitlines()
        yield from (f"{indent}{other}" for other in before)
        spec = capture.specs.get(node.name)
        yield f"{indent}{line}" + (f"  # {spec}" if spec is not None else "")


def _heading(op: Op, node: fx.Node) -> str:
    """The module whose forward has the line, then the line."""
    module = op.module.rpartition(".")[0] if node.op == "call_module" else op.module
    if op.source is None:
        return _plain(module)
    where = f"{op.source.file}:{op.source.line}"
    return _plain(" | ".join(part for part in (module, where, op.source.text) if part))


def _plain(text: str) -> str:
    """Names come from the model: nothing in them may end a comment or a docstring."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return printable.replace('"""', "'''").replace("\\", "/")


def _autocast(node: fx.Node, writer: Writer) -> str:
    _, dtype, enabled, cache = node.args
    kind = writer.device.removesuffix(".device") + ".device.type"
    settings = f"dtype={writer.argument(dtype)}, enabled={enabled}"
    cached = "" if cache is None else f", cache_enabled={cache}"
    return f"with torch.autocast({kind}, {settings}{cached})"


def _uses_batch(capture: Capture, nodes: Sequence[fx.Node]) -> bool:
    return any(
        "batch" in capture.literals.get(used.name, "")
        for node in nodes
        for used in node.all_input_nodes
    )


def _batch(capture: Capture, inputs: Sequence[Port], names: dict[str, str]) -> str:
    """The batch size read off an input, one that has it as a dimension if possible."""
    specs = [(names[port.value], capture.specs[port.value]) for port in inputs]
    for name, spec in specs:
        if spec.batch_dim is not None:
            return f"{name}.size({spec.batch_dim})"
    for name, spec in specs:
        for place, dim in enumerate(spec.shape):
            factor, _, rest = str(dim).partition("*")
            if rest == "batch" and factor.isdecimal():
                return f"{name}.size({place}) // {factor}"
    raise AssertionError("wiring gives a stage that needs the batch size a value that has it")


def _tensors(count: int) -> str:
    return ", ".join(["Tensor"] * count) or "()"


def _summary(capture: Capture, nodes: Sequence[fx.Node]) -> str:
    named = [m for m in (capture.ops[node.name].module for node in nodes) if m]
    if not named:
        return f"{len(nodes)} ops."
    within = f"in {named[0]}" if named[0] == named[-1] else f"from {named[0]} to {named[-1]}"
    return _plain(f"{len(nodes)} ops, {within}.")


def _take(capture: Capture, port: Port, names: dict[str, str]) -> str:
    if port.source is None:
        origin = "the caller"
    else:
        origin = f"stage {port.source}" + (" (portal)" if port.portal else "")
    return f"Takes {names[port.value]}: {capture.specs[port.value]} from {origin}"


def _imports(text: str) -> list[str]:
    lines = ["import torch"] if "torch." in text else []
    lines.append("from torch import Tensor, nn")
    if "F." in text:
        lines.append("from torch.nn import functional as F")
    return lines
