"""What a person would call each value: the user's own variable, else a word for what it is.

Dynamo names a value after the variable that it is assigned to first, but for variables that inner
functions read, and for what an nn.Sequential makes, whose own variable it takes: there the user's
statement is read. What is part of a longer expression has no variable: it is called after the
module or function that made it.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from fxpipe.capture.simplify import named_by_user, word_of
from fxpipe.ir import Op
from fxpipe.ops.interpret import NAMED
from fxpipe.ops.source import calls_around
from fxpipe.ops.variables import base
from fxpipe.runtime.leaves import leaves
from fxpipe.runtime.structure import Structure

# What shows the same values in another form keeps their name.
_SAME = {
    *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "t", "T"),
    *("squeeze", "unsqueeze", "expand", "expand_as", "repeat", "contiguous", "clone", "detach"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool"),
    *("getitem", "view_as", "reshape_as", "roll", "flip", "pad", "rearrange"),
}
_WORDS = {
    **dict.fromkeys(("add", "iadd", "sum", "radd", "addcmul"), "total"),
    **dict.fromkeys(("sub", "isub", "rsub"), "difference"),
    **dict.fromkeys(("mul", "imul", "rmul"), "product"),
    **dict.fromkeys(("truediv", "div", "floordiv", "itruediv"), "quotient"),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "invert", "not"), "mask"),
    **dict.fromkeys(("logical_and", "logical_or", "logical_not", "isinf", "isnan"), "mask"),
    **{"neg": "negative", "pow": "power", "abs": "magnitude", "mod": "remainder"},
    **{"min": "minimum", "max": "maximum", "pos": "value", "getattr": "value"},
    **{"scaled_dot_product_attention": "attention", "multi_head_attention_forward": "attention"},
    "apply": "output",
}


def name_values(
    graph: fx.Graph, ops: Mapping[str, Op], modules: Mapping[str, nn.Module], outputs: Structure
) -> dict[str, Op]:
    """Rename the values of `graph` in place; returns `ops` under the new names.

    `modules` are all of the model's, by path.
    """
    found: Any = graph.output_node().args[0]
    results: dict[fx.Node, str] = {}
    for structure in [outputs["train"], outputs["eval"]] if "eval" in outputs else [outputs]:
        for path, place in leaves(structure):
            field = re.sub(r"\W+", "_", path).strip("_")
            results.setdefault(found[place], field if field.isidentifier() else "output")
    taken = {node.name for node in graph.nodes if not node.op.startswith("call_")}
    renamed: dict[str, str] = {}
    for node in graph.nodes:
        if not node.op.startswith("call_"):
            continue
        variable = _variable(node, results.get(node), modules)
        name, number = variable, 1
        while name in taken:
            number += 1
            name = f"{variable}_{number}"
        taken.add(name)
        renamed[node.name] = name
        node.name = name
    return {
        renamed.get(name, name): dataclasses.replace(
            op,
            name=renamed.get(name, name),
            storage=renamed.get(op.storage, op.storage),
            mutates=tuple(renamed.get(storage, storage) for storage in op.mutates),
            may_share=tuple(renamed.get(storage, storage) for storage in op.may_share),
        )
        for name, op in ops.items()
        if name in renamed  # the others were dropped, and their names are free
    }


def _variable(node: fx.Node, result: str | None, modules: Mapping[str, nn.Module]) -> str:
    node.meta[NAMED] = "variable"
    if "variable" in node.meta:
        return base(node.meta["variable"])
    if named_by_user(node):
        return base(node.name)
    assigned = _assigned(node)
    if assigned is not None:
        return assigned
    made = result or _list_item(node) or _maker(node, modules) or _form_of(node)
    node.meta[NAMED] = "word" if made is None else "maker"
    return made or _word(node)


def _assigned(node: fx.Node) -> str | None:
    """The variable that the user's statement assigns it to, or that of who called what returns it.

    Where that reads the value too, as a loop does that begins anew, it can't be told.
    """
    frames = node.meta.get("frames", ())
    for depth, statement in reversed([*enumerate(node.meta.get("statements", ()), 1)]):
        if any(user.meta.get("frames", ())[:depth] == frames[:depth] for user in node.users):
            return None
        if not statement.returns:
            name: str | None = statement.assigns
            return name
    return None


def _list_item(node: fx.Node) -> str | None:
    """What is appended to `outputs` is an `output`."""
    statements = node.meta.get("statements", ())
    if not statements or _used_in_its_statement(node):
        return None
    named = [name for name in statements[-1].lists if name.endswith("s")]
    return _singular(named[0]) if len(named) == 1 else None


def _maker(node: fx.Node, modules: Mapping[str, nn.Module]) -> str | None:
    """The function or module that returned it: what is returned is called so by who called."""
    statements = node.meta.get("statements", ())
    if statements and statements[-1].returns and not _used_in_its_statement(node):
        function = statements[-1].function
        if function == "forward":
            above = calls_around(node)
            return _called(above[-1][0], modules) if above else None
        return function.strip("_") if function.isidentifier() else None
    if node.op == "call_module":
        return _called(str(node.target), modules)
    for used in node.all_input_nodes:  # F.linear(x, self.q.weight)
        owner, _, last = str(used.target).rpartition(".")
        if used.op == "get_attr" and last == "weight" and word_of(node) not in {*_SAME, *_WORDS}:
            return _called(owner, modules)
    return None


def _used_in_its_statement(node: fx.Node) -> bool:
    """Whether the statement, or what it calls, goes on with the value."""
    frames = node.meta.get("frames", ())
    return any(user.meta.get("frames", ())[: len(frames)] == frames for user in node.users)


def _called(path: str, modules: Mapping[str, nn.Module]) -> str | None:
    """A module's own name; of a list, as one of them; in a Sequential all is `x`."""
    above, _, last = path.rpartition(".")
    if isinstance(modules.get(above), nn.Sequential):
        return "x"
    if last.isdecimal():
        last = _singular(above.rpartition(".")[2])
    return last if last.isidentifier() else None


def _form_of(node: fx.Node) -> str | None:
    """The name of what it shows in another form."""
    if word_of(node) not in _SAME or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    given = node.args[0]
    if given.op == "get_attr":
        last = str(given.target).rpartition(".")[2]
        return base(last) if last.isidentifier() else None
    return base(given.name)


def _word(node: fx.Node) -> str:
    word = word_of(node)
    if node.target == "input" or not word.isidentifier():
        return "x"
    return _WORDS.get(word, word)


def _singular(name: str) -> str:
    return name.removesuffix("s")
