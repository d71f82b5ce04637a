"""Which dtypes in a graph are the model's own, seen by what the model calls in another precision.

The model runs on fake tensors of that precision, then the graph does, op by op: of an op that holds
the dtype, or a limit of it, that reading is taken under which it makes the model's next calls.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from fxpipe.capture.calls import Calls, calls_of
from fxpipe.capture.dynamo import FlatModel
from fxpipe.capture.edit import leaves_of
from fxpipe.errors import FxpipeError
from fxpipe.memory import faked
from fxpipe.ops.interpret import DTYPE, TRAINING, Compute, run_graph
from fxpipe.quiet import quiet
from fxpipe.runtime.leaves import in_mode, places


def follow(
    graph: fx.Graph,
    model: FlatModel,
    modules: Mapping[str, nn.Module],
    state: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    swaps: Mapping[Any, Any],
    other: torch.dtype,
) -> "Follower | None":
    """The ops whose constants in `swaps` become others as the model does, and all their values.

    None if the graph, whichever way they are read, does not make all of the model's calls.
    """
    try:
        with quiet(), faked(model, other) as fake, fake.mode:
            given = [fake.copies(tensors) for _ in range(2)]
            expected = calls_of(lambda: model(*given[0]))
            follower = Follower(expected, swaps)
            attributes = {**{name: fake(t) for name, t in state.items()}}
            with follower.calls:
                made = run_graph(
                    graph, modules, {**attributes, TRAINING: True, DTYPE: other}, given[1], follower
                )
    except (FxpipeError, RuntimeError, ValueError):
        return None
    kept = [made[place] for place in places(in_mode(model.outputs, training=True))]
    same = [*follower.calls.found, *map(follower.calls.kind, kept)] == expected
    return follower if same else None


class Follower:
    """A hook for `run_graph` that reads each op as `expected` has it."""

    def __init__(self, expected: Sequence[Any], swaps: Mapping[Any, Any]) -> None:
        self.calls = Calls()
        self.opened: set[fx.Node] = set()
        self.values: dict[fx.Node, Any] = {}
        self._expected = expected
        self._swaps = swaps

    def __call__(
        self, node: fx.Node, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute the op. Raises RuntimeError where no reading makes the calls that are next."""
        start, numbers = len(self.calls.found), dict(self.calls.numbers)
        readings = []
        for is_opened in [False, True] if self._holds(node) else [False]:
            self.calls.found[start:], self.calls.numbers = [], dict(numbers)
            given = tree_map(self._swapped, (args, kwargs)) if is_opened else (args, kwargs)
            result = compute(*given)
            found = self.calls.found[start:]
            if found == self._expected[start : start + len(found)]:
                # One that makes more of the calls is surer; of two that make none, either will do.
                readings.append((len(found), is_opened, result, found, self.calls.numbers))
        if not readings:
            raise RuntimeError(f"{node.name} makes other calls than the model")
        _, is_opened, result, found, self.calls.numbers = max(readings, key=lambda r: r[:2])
        self.calls.found[start:] = found
        if is_opened:
            self.opened.add(node)
        self.values[node] = result
        return result

    def _holds(self, node: fx.Node) -> bool:
        return any(self._swapped(leaf) is not leaf for leaf in leaves_of(node))

    def _swapped(self, leaf: Any) -> Any:
        constant = isinstance(leaf, float | torch.dtype)
        return self._swaps.get(leaf, leaf) if constant else leaf
