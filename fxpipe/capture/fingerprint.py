"""By which a capture is known again."""

import hashlib
import re
from collections.abc import Mapping

from torch import fx

from fxpipe.ops.regions import PLAIN, REGION
from fxpipe.runtime.manifest import TensorSpec


def fingerprint(graph: fx.Graph, specs: Mapping[str, TensorSpec]) -> str:
    """Equal for the same graph on values of the same kind, whatever the weights."""
    lines = [
        f"{n.op} {n.name} {n.target} {n.args} {n.kwargs} {n.meta.get(REGION, PLAIN)}"
        for n in graph.nodes
    ]
    lines += [f"{name} {spec}" for name, spec in specs.items()]
    text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]
