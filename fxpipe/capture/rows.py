"""For how many rows does the graph hold? Forward may go by that: `if len(x) > 4`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fxpipe.capture.calls import CallCheck
from fxpipe.capture.check import Check, Checked
from fxpipe.capture.sizes import Sizes, resized
from fxpipe.errors import InputError
from fxpipe.runtime.fit import unmet

_MOST = 2  # times the traced rows: more may be too many for this machine
_TRIED = 4  # numbers of rows, of which the model may refuse some, as above the traced ones


def with_rows_known(
    sizes: Sizes, check: Check | CallCheck, found: Checked, tensors: Sequence[Tensor], step: int
) -> Sizes:
    """What a trace of `tensors` says, with conditions on rows where numbers hang on them alone.

    The model takes multiples of `step` rows alone. Graph and model are compared where a condition
    is not met, and on one step, or two: tracing takes for granted that there is not one row, and of
    comparisons with numbers it keeps none that others imply, by which a kernel was chosen. `found`
    is what `check` gave.
    """
    rows = _Rows(sizes, check, found, tensors)
    batch = sizes.values["batch"]
    kept = [f"batch % {step} == 0"] if step > 1 else []
    if not found.agrees_in_train:  # as of some calls without memory: no rows show what is needless
        return replace(sizes, conditions=tuple(dict.fromkeys([*kept, *sizes.conditions])))
    for condition in sizes.conditions:
        some = range(step, _MOST * batch + 1, step)
        broken = [n for n in some if unmet([condition], sizes.values, [n]) is not None]
        broken.sort(key=lambda n: abs(n - batch))
        asked = map(rows.agree, broken[:_TRIED])
        if not broken or next((agree for agree in asked if agree is not None), None) is False:
            kept.append(condition)
    few = step
    agree = rows.agree(few)
    if agree is None:
        few, agree = 2 * step, rows.agree(2 * step)
    if agree is False and few < batch and unmet(kept, sizes.values, [few]) is None:
        enough = batch
        while enough - few > step:
            n = (few + enough) // (2 * step) * step
            few, enough = (n, enough) if rows.agree(n) is False else (few, n)
        kept.append(f"batch > {few}")
    return replace(sizes, conditions=tuple(dict.fromkeys(kept)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The inputs with other numbers of rows, and all other sizes as they were traced."""

    sizes: Sizes
    check: Check | CallCheck
    found: Checked
    tensors: Sequence[Tensor]

    def agree(self, n: int) -> bool | None:
        """Whether graph and model do on n rows; None if the model by itself does not take them."""
        inputs = resized(self.tensors, self.sizes, {**self.sizes.values, "batch": n})
        try:
            there = replace(self.check, inputs=inputs).run()
        except InputError:
            return None
        except Exception:  # the graph takes another way than the model
            return False
        modes = (there.agrees_in_train, there.agrees_in_eval)
        return modes >= (self.found.agrees_in_train, self.found.agrees_in_eval)
