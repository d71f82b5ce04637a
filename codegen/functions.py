"""functions.py of a package: the custom autograd.Functions, and who imports them."""

import re

import torch
from torch import fx

from fxpipe.ir import Capture


def function_called(node: fx.Node) -> str | None:
    """The name in functions.py of the custom autograd.Function that `node` applies."""
    owner = getattr(node.target, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner.__name__
    return None


def functions_imported(capture: Capture, code: str) -> list[str]:
    """The line that imports what `code` uses of functions.py, if it does."""
    every = {name for node in capture.graph.nodes if (name := function_called(node))}
    names = sorted(name for name in every if re.search(rf"(?<![\w.]){name}\.apply\(", code))
    return [f"from .functions import {', '.join(names)}"] if names else []
