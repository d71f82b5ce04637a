"""Does what forward gives for a row hang on the other rows? A micro-batch has fewer of them."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.capture.check import Check
from fxpipe.capture.observe import Observer
from fxpipe.capture.sizes import Sizes
from fxpipe.difference import distance, largest
from fxpipe.ops.interpret import Compute, Hook, plainly, untouched
from fxpipe.runtime.backward import differentiable
from fxpipe.runtime.fit import unmet


def mixed_rows(check: Check, sizes: Sizes, batched: Sequence[bool], step: int) -> str:
    """Where forward first mixes rows, in words; "" if no output in eval mode shows that it does.

    A batch as a whole is compared with its two parts, each of a multiple of `step` rows. A model
    that takes no such parts, or draws random numbers in eval mode too, shows nothing.
    """
    rows = next(len(x) for x, cut in zip(check.inputs, batched, strict=True) if cut)
    first = rows // step // 2 * step
    if not first or unmet(sizes.conditions, sizes.values, [first, rows - first]) is not None:
        return ""
    parts = [
        [x[begin:end] if cut else x for x, cut in zip(check.inputs, batched, strict=True)]
        for begin, end in ((0, rows), (0, first), (first, rows))
    ]
    observer = Observer(check.modules, check.state)
    hooks: list[Hook] = [observer, plainly, plainly]
    try:
        outputs = [_run(check, part, hook) for part, hook in zip(parts, hooks, strict=True)]
    except Exception:  # as of an op that takes no such part
        return ""
    mixed = any(_mixed(rows, *each) for each in zip(*outputs, strict=True))
    if not mixed or any(op.random for op in observer.ops.values()):
        return ""
    seen: list[dict[str, Tensor]] = [{}, {}, {}]
    for part, values in zip(parts, seen, strict=True):
        _run(check, part, partial(_noted, values))
    both = set.intersection(*map(set, seen))
    names = (name for name in seen[0] if name in both)
    name = next((name for name in names if _mixed(rows, *(values[name] for values in seen))), "")
    source = observer.ops[name].source if name else None
    return str(source or "an output of forward")


def _run(check: Check, inputs: Sequence[Tensor], hook: Hook) -> list[Tensor]:
    with untouched(check.flat, check.state), torch.no_grad():
        check.flat.eval()
        return check.graph_outputs(inputs, False, hook)


def _noted(
    values: dict[str, Tensor],
    node: fx.Node,
    compute: Compute,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A hook that keeps a copy of what each op made: others may write it."""
    made = compute(args, kwargs)
    if isinstance(made, Tensor):
        values[node.name] = made.clone()
    return made


def _mixed(rows: int, whole: Tensor, *parts: Tensor) -> bool:
    """Whether `rows` are others than in parts, by more than other kernels for other sizes make.

    They are in the one dimension that parts have less of, each in one piece or in several places.
    """
    if not differentiable(whole) or any(part.dim() != whole.dim() for part in parts):
        return False
    sizes = list(zip(whole.shape, *(part.shape for part in parts), strict=True))
    changed = [dim for dim, (n, *less) in enumerate(sizes) if any(one != n for one in less)]
    if len(changed) != 1:
        return False
    (dim,) = changed
    n, *less = sizes[dim]
    if sum(less) != n or n % rows:
        return False
    return all(_differs(whole, joined) for joined in _joined(parts, dim, n // rows))


def _joined(parts: tuple[Tensor, ...], dim: int, n_places: int) -> Iterator[Tensor]:
    """The parts one after the other; and in the order of rows that go place by place."""
    yield torch.cat(parts, dim)
    if n_places > 1 and all(part.size(dim) % n_places == 0 for part in parts):
        apart = [torch.unflatten(part, dim, (n_places, -1)) for part in parts]
        yield torch.cat(apart, dim + 1).flatten(dim, dim + 1)


def _differs(whole: Tensor, joined: Tensor) -> bool:
    """Of what is the same to the last bit, as a mask's -1e9, it does not matter how large it is."""
    tolerance = torch.finfo(whole.dtype).eps ** 0.5
    return bool(distance(joined, whole) > tolerance * largest(whole[whole != joined]))
