"""Sizes that a model computes by way of floats, `int(rows / 9)`, as whole numbers: `rows // 9`."""

import sympy
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    ToFloat,
    TruncToInt,
)

_Ratio = tuple[sympy.Expr, sympy.Expr]
_DYADIC = {1, 2, 4, 8, 16, 32, 64}  # what floats divide by without rounding


def whole(expression: sympy.Expr) -> sympy.Expr:
    """The same size, without floats where they are quotients of sizes that are rounded."""
    rounded = expression.replace(
        lambda part: isinstance(part, TruncToInt | FloorToInt | CeilToInt), _rounded
    )
    return rounded.replace(lambda part: isinstance(part, FloorDiv), _divided)


def _rounded(call: sympy.Expr) -> sympy.Expr:
    ratio = _ratio(call.args[0])
    if ratio is None:
        return call
    above, below = ratio
    if isinstance(call, CeilToInt):
        return FloorDiv(above + below - 1, below)
    quotient = FloorDiv(above, below)
    # Below zero int() and // round to different sides, if there is something to round.
    down = isinstance(call, FloorToInt) or above.is_nonnegative or not quotient.has(FloorDiv)
    return quotient if down else call


def _divided(call: sympy.Expr) -> sympy.Expr:
    """A division by a size without it, if it divides: (batch * length + length - 1) // length."""
    above, below = call.args
    if not below.is_Symbol or not above.is_polynomial(below):
        return call
    quotient, rest = sympy.div(above, below, below)
    return quotient + rest if rest in (0, -1) else call


def _ratio(number: sympy.Expr) -> _Ratio | None:
    """A float as a quotient of whole numbers; None if rounding it may give another than that.

    The float that is nearest to a quotient of sizes lies on the same side of a whole number as the
    quotient. Of a product that is so where no factor was rounded before.
    """
    if isinstance(number, ToFloat):
        return number.args[0], sympy.S.One
    if isinstance(number, sympy.Float | sympy.Integer):
        exact = sympy.Rational(number)
        return (exact.numerator, exact.denominator) if exact.q in _DYADIC else None
    if isinstance(number, IntTrueDiv):
        above, below = number.args
        return above, below
    if not isinstance(number, FloatTrueDiv | sympy.Mul):
        return None
    ratios = [ratio for part in number.args if (ratio := _ratio(part)) is not None]
    if len(ratios) < len(number.args):
        return None
    if isinstance(number, FloatTrueDiv):
        (above, below), (over, under) = ratios
        return above * under, below * over
    if any(below not in _DYADIC for _, below in ratios):
        return None
    return sympy.Mul(*(above for above, _ in ratios)), sympy.Mul(*(below for _, below in ratios))
