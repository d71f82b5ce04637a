"""For how many rows does the graph hold? Forward may go by that: `if len(x) > 4`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from fxpipe.capture.calls import CallCheck
from fxpipe.capture.check import Check, Checked
from fxpipe.capture.sizes import Sizes, resized
from fxpipe.errors import InputError
from fxpipe.runtime.sizes import holds

_NOT_ONE = "batch > 1"  # tracing takes this for granted
_MOST = 2  # times the traced rows: more may be too many for this machine


def with_rows_known(
    sizes: Sizes, check: Check | CallCheck, found: Checked, tensors: Sequence[Tensor]
) -> Sizes:
    """What a trace of `tensors` says, with those conditions on rows that numbers hang on.

    Graph and model are compared where such a condition is not met, and on one row. `found` is what
    `check` gave.
    """

    def same(n: int) -> bool:
        inputs = resized(tensors, sizes, {**sizes.values, "batch": n})
        try:
            there = replace(check, inputs=inputs).run()
        except InputError:  # the model by itself takes so many no more, and says so
            return True
        except Exception:  # the graph takes another way than the model
            return False
        modes = (there.agrees_in_train, there.agrees_in_eval)
        return modes >= (found.agrees_in_train, found.agrees_in_eval)

    def kept() -> Iterator[str]:
        others = [*range(2, _MOST * sizes.values["batch"] + 1), 1]
        for condition in sizes.conditions:
            if re.search(r"\bbatch\b", condition):
                known = ({**sizes.values, "batch": n} for n in others)
                n = next((at["batch"] for at in known if not holds(condition, at)), None)
                if n is not None and same(n):
                    continue
            yield condition
        if isinstance(check, Check) and not same(1):
            yield _NOT_ONE

    return replace(sizes, conditions=tuple(kept()))
