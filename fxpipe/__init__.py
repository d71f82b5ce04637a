"""fxpipe: a compiler for pipeline parallelism in PyTorch.

    package = fxpipe.compile(model, (x,), devices=2, microbatches=4)
    package.write("out")
    pipe = fxpipe.load("out")

Each name is imported when it is first used, so that a package that is only run never loads what
compiling needs.
"""

import importlib
from typing import TYPE_CHECKING

from fxpipe import errors

if TYPE_CHECKING:
    from fxpipe import checkpoint
    from fxpipe.compiler import compile
    from fxpipe.memory import without_memory
    from fxpipe.package import Package
    from fxpipe.runtime import Pipeline, Runner, load, splice
    from fxpipe.runtime.torch_pipelining.package import to_torch_pipelining
    from fxpipe.schedule import Schedule

__version__ = "0.1.0"
__all__ = [
    "Package",
    "Pipeline",
    "Runner",
    "Schedule",
    "checkpoint",
    "compile",
    "errors",
    "load",
    "splice",
    "to_torch_pipelining",
    "without_memory",
]

_HOMES = {
    "compile": "fxpipe.compiler",
    "Package": "fxpipe.package",
    "load": "fxpipe.runtime",
    "Pipeline": "fxpipe.runtime",
    "Runner": "fxpipe.runtime",
    "Schedule": "fxpipe.schedule",
    "without_memory": "fxpipe.memory",
    "splice": "fxpipe.runtime",
    "to_torch_pipelining": "fxpipe.runtime.torch_pipelining.package",
}


def __getattr__(name: str) -> object:
    if name == "checkpoint":
        return importlib.import_module("fxpipe.checkpoint")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fxpipe' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
