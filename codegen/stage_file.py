"""The files of a package that hold classes: one for each stage, one for repeated modules."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fxpipe.codegen.block import Block
from fxpipe.codegen.class_text import ClassText, class_text
from fxpipe.codegen.comments import LINE, Comments
from fxpipe.codegen.constructor import construct, held_state, tie_lines
from fxpipe.codegen.functions import functions_imported
from fxpipe.codegen.names import plain
from fxpipe.codegen.scope import Scope
from fxpipe.codegen.segments import segment_of, segment_spec
from fxpipe.ir import Capture, Port, StageWiring
from fxpipe.ops.source import forward_place

_DOC_WIDTH = LINE - 11  # columns that a line has for a class's docstring


@dataclass(frozen=True, slots=True)
class StageFile:
    """The template's fields of one stage, and what plan.json says of its forward and state."""

    fields: dict[str, object]
    parameters: tuple[str, ...]
    held: tuple[str, ...]


def stage_file(
    capture: Capture, wiring: StageWiring, scope: Scope, blocks: Sequence[Block], j: int, n: int
) -> StageFile:
    """Decide every line of stage `j` of `n`."""
    ops = {node.name: node for node in capture.graph.nodes if node.name in set(wiring.ops)}
    held = held_state(capture, [ops[name] for name in wiring.ops])
    ties = tie_lines(capture, held, construct(scope).containers)
    text = class_text(
        scope,
        f"Stage{j}",
        [_summary(capture, wiring.ops)],
        dtype=capture.dtype,
        comments=Comments("", ""),
        ties=ties,
        docs={
            name: _recomputed(capture, wiring.segments[segment_of(own.nodes)])
            for name, own in scope.methods.items()
        },
    )
    takes = [_take(scope, port, text.names[port.value]) for port in wiring.inputs]
    returns = list(_returns(scope, [(text.names[v], v) for v in wiring.outputs]))
    fields: dict[str, object] = {
        "j": j,
        "n": n,
        "model": plain(capture.model_name),
        "ports": [*takes, *returns],
        "imports": _imports(capture, [text], blocks, bool(wiring.segments)),
        "stage": text,
    }
    return StageFile(fields, tuple(text.names[port.value] for port in wiring.inputs), held)


def blocks_file(capture: Capture, blocks: Sequence[Block]) -> dict[str, object]:
    """Decide every line of the classes of repeated modules."""
    texts = []
    for block in blocks:
        place = forward_place(block.kind)
        file = place[0] if place else ""
        doc = _doc(block, file)
        texts.append(
            class_text(
                block.scope,
                block.name,
                [doc],
                dtype=capture.dtype,
                comments=Comments(block.scope.path, file),
            )
        )
    return {
        "model": plain(capture.model_name),
        "imports": _imports(capture, texts, (), False),
        "blocks": texts,
    }


def _doc(block: Block, file: str) -> str:
    """Which class of the user's it is, how often it occurs, and where."""
    kinds = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", p) for p in block.paths))
    count = f"{len(block.paths)} times" if len(block.paths) > 1 else "called more than once"
    whole = f"{block.kind.__name__} of {file or block.kind.__module__}, {count}"
    for told in (f"{whole}: {', '.join(kinds[:k])}" for k in range(len(kinds), 0, -1)):
        others = ", ..." if not told.endswith(kinds[-1]) else "."
        if len(told + others) <= _DOC_WIDTH:
            return plain(told + others)
    return plain(f"{whole}.")


def _summary(capture: Capture, names: Sequence[str]) -> str:
    count = "1 op" if len(names) == 1 else f"{len(names)} ops"
    named = [module for module in (capture.ops[name].module for name in names) if module]
    if not named:
        return f"{count}."
    within = f"in {named[0]}" if named[0] == named[-1] else f"from {named[0]} to {named[-1]}"
    return plain(f"{count}, {within}.")


def _recomputed(capture: Capture, names: Sequence[str]) -> str:
    told = segment_spec(capture, names)
    through = "" if told.first == told.last else f" to {told.last}"
    return plain(f"Computed again in backward: {told.first}{through}.")


def _take(scope: Scope, port: Port, variable: str) -> str:
    if port.source is None:
        origin = "the caller"
    else:
        origin = f"stage {port.source}" + (" (portal)" if port.portal else "")
    return f"Takes {variable}: {scope.specs[port.value]} from {origin}"


def _returns(scope: Scope, results: Sequence[tuple[str, str]]) -> Iterator[str]:
    """What a stage returns (variable, value); of a list that is alike in all places a line."""

    def alike(result: tuple[str, str]) -> tuple[str, str]:
        name, bracket, _ = result[0].partition("[")
        return name + bracket, str(scope.specs[result[1]])

    for (_, spec), run in groupby(results, key=alike):
        names = [name for name, _ in run]
        last = f" to [{names[-1].partition('[')[2]}" if len(names) > 1 else ""
        yield f"Returns {names[0]}{last}: {spec}"


def _imports(
    capture: Capture, texts: Iterable[ClassText], blocks: Sequence[Block], recomputes: bool
) -> list[str]:
    """The lines that import what the code uses."""
    code = "\n".join(text.code for text in texts)

    def used(name: str) -> bool:
        return re.search(rf"(?<![\w.]){name}\.", code) is not None

    lines = [f"import {name}" for name in ("math", "operator") if used(name)]
    lines += ["from collections import OrderedDict"] * ("OrderedDict(" in code)
    lines += [""] * bool(lines)  # the standard library stands apart
    lines += ["import torch"] * used("torch")
    lines += ["from fxpipe.runtime.segment import checkpoint"] * recomputes
    lines.append("from torch import Tensor, nn" if "Tensor" in code else "from torch import nn")
    lines += ["from torch.nn import functional as F"] * used("F")
    lines += ["from torch.nn.attention import SDPBackend, sdpa_kernel"] * used("SDPBackend")
    named = sorted(b.name for b in blocks if re.search(rf"(?<![\w.]){b.name}\(", code))
    own = [f"from .blocks import {', '.join(named)}"] if named else []
    own += functions_imported(capture, code)
    return [*lines, "", *own] if own else lines
