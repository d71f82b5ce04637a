"""Sizes of a batch whose rows come in multiples of a number: of pairs, `batch // 2 * 2` is `batch`.

Tracing divides by what it is asked to divide by, and does not conclude that nothing is left.
"""

import ast
import re
from dataclasses import replace

import sympy
from torch import fx


def write_multiples(graph: fx.Graph, step: int) -> None:
    """Write the shapes of values in `graph`, in place, as of a batch of multiples of `step` rows.

    Else nobody knew how many rows an output has for each row of the batch.
    """
    for node in graph.nodes:
        spec = node.meta.get("spec")
        if spec is not None:
            shape = tuple(_divided(dim, step) for dim in spec.shape)
            node.meta["spec"] = replace(spec, shape=shape)


def _divided(dim: int | str, step: int) -> int | str:
    """The same size without divisions, if they leave nothing."""
    if isinstance(dim, int) or "//" not in dim:
        return dim
    names = set(re.findall(r"\b[^\W\d]\w*", dim)) - {"max", "min"}
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in names}
    groups = sympy.Symbol("groups", integer=True, positive=True)
    known = {**symbols, "batch": step * groups, "max": sympy.Max, "min": sympy.Min}
    found = sympy.sympify(eval(dim, {"__builtins__": {}}, known))
    if not found.is_polynomial(*found.free_symbols):
        return dim
    written = found.subs(groups, sympy.Symbol("batch") / step)
    if written.is_Integer:
        return int(written)
    whole = all(part.is_Integer for part in sympy.Poly(written).coeffs())
    return ast.unparse(ast.parse(str(written), mode="eval")) if whole else dim
