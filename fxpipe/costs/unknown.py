"""How large values are whose shape depends on data, such as the tokens that go to an expert."""

import dataclasses
from typing import Any

from torch import fx

from fxpipe.ir import Capture, OpCost
from fxpipe.ops.interpret import Compute


class Unknown:
    """A hook for `run_graph` that notes the most bytes of each such value, by its name."""

    def __init__(self, capture: Capture) -> None:
        self.names = frozenset(name for name, spec in capture.specs.items() if spec.of_data)
        self.bytes: dict[str, int] = {}
        self._ops = capture.ops

    def __call__(
        self, node: fx.Node, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute the op, and look at what it made."""
        made = compute(args, kwargs)
        if node.name in self.names:
            self.bytes[node.name] = max(made.nbytes, self.bytes.get(node.name, 0))
        return made

    def at_most(self, cost: OpCost) -> OpCost:
        """What an op costs, measured on one micro-batch, if it saves the most of such values."""
        most = {self._ops[name].storage: size for name, size in self.bytes.items()}
        saved = ((storage, max(size, most.get(storage, 0))) for storage, size in cost.saved)
        return dataclasses.replace(cost, saved=tuple(saved))
