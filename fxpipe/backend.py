"""The backend of `torch.compile(module, backend="fxpipe", options={...})`.

Registered as an entry point, so that nobody has to import fxpipe for it. Dynamo gives the graph of
the module's forward, guards it, and comes back when something it depends on has changed: the train
or eval mode, which parameters are frozen, sizes other than the batch. Each such graph is compiled
once, at its first call.
"""

import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from fxpipe.capture import frame
from fxpipe.capture.inputs import batch_of, with_rows
from fxpipe.capture.region import (
    Region,
    closed,
    has_open_batch,
    inputs_of,
    region,
)
from fxpipe.capture.served import Served
from fxpipe.compiler import compile
from fxpipe.edits import refuse_loss
from fxpipe.errors import CaptureError, InputError
from fxpipe.runtime import Pipeline, load
from fxpipe.runtime.closure import running
from fxpipe.runtime.weights.share import share

_OPTIONS = ("devices", "microbatches", "schedule", "checkpoint", "solver", "out")
_WAY_OUT = 'give the module to pipeline to torch.compile(module, backend="fxpipe", ...)'


class _Known(NamedTuple):
    """A pipeline, the graph that it was compiled from, and under which settings."""

    graph: Served
    settings: str
    pipe: Pipeline


_PIPES: weakref.WeakKeyDictionary[nn.Module, list[_Known]] = weakref.WeakKeyDictionary()


def backend(
    traced: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None
) -> "Stand":
    """What runs in the place of `traced`: a pipeline over the module's own parameters.

    Options are `devices` and `microbatches`, which must be given, and if wanted `schedule`,
    `checkpoint`, `solver`, as in `fxpipe.compile`, and `out`, the folder that the package is
    written to (`out-2` and so on for further graphs). Raises InputError, under torchrun too: the
    pipeline is one of this process.
    """
    _check(options or {})
    _refuse_many()
    root = frame.root_module()
    if root is None:
        raise InputError(f"fxpipe pipelines modules, not functions: {_WAY_OUT}")
    broken = frame.graph_break()
    if broken is not None:
        raise CaptureError(
            f"the forward of {type(root).__name__} is no single graph, {broken}\n{_WAY_OUT}, one "
            "without that line"
        )
    inputs = inputs_of(traced, root)
    graph = Served.of(traced, inputs)
    known = _known(root, graph, options or {})
    if known is None and not has_open_batch(traced, inputs):
        frame.again_with_open_batch(list(inputs.values()))
    part = region(closed(traced, inputs), root)
    return Stand(part, weakref.ref(root), tuple(inputs), options or {}, graph)


class Stand:
    """Stands where Dynamo's graph would: takes and returns what it does."""

    def __init__(
        self,
        part: Region,
        root: "weakref.ref[nn.Module]",
        places: tuple[int, ...],
        options: Mapping[str, Any],
        graph: Served,
    ) -> None:
        self._part: Region | None = part
        self._root = root
        self._places = places
        self._options = options
        self._graph = graph
        self._pipe: weakref.ref[Pipeline] | None = None

    def __call__(self, *given: Any) -> Sequence[Tensor]:
        """The graph's outputs, from the pipeline. The first call compiles it."""
        root = self._root()
        assert root is not None
        tensors = [given[k] for k in self._places]
        pipe = None if self._pipe is None else self._pipe()
        if pipe is None:
            pipe = self._found(root, tensors)
            self._pipe = weakref.ref(pipe)
        outputs: Sequence[Tensor] = pipe(*tensors)
        return outputs

    def _found(self, root: nn.Module, tensors: Sequence[Tensor]) -> Pipeline:
        """The pipeline that serves this graph, compiled now if there is none."""
        pipe, part = _known(root, self._graph, self._options), self._part
        self._part = None
        if pipe is None:
            assert part is not None
            made = _PIPES.setdefault(root, [])
            pipe = _compiled(part, root, tensors, self._options, len(made))
            made.append(_Known(self._graph, _settings(self._options), pipe))
        return pipe


def _known(root: nn.Module, graph: Served, options: Mapping[str, Any]) -> Pipeline | None:
    """The pipeline of `root` that serves the graph, if one does."""
    settings = _settings(options)
    for known in _PIPES.get(root, ()):
        if known.settings == settings and known.graph.serves(graph):
            return known.pipe
    return None


def _compiled(
    part: Region, root: nn.Module, tensors: Sequence[Tensor], options: Mapping[str, Any], n: int
) -> Pipeline:
    settings = {name: value for name, value in options.items() if name != "out"}
    out = Path(f"{options['out']}-{n + 1}" if n else options["out"]) if "out" in options else None
    if out is not None:
        refuse_loss(out)  # before the work rather than after it
    n_microbatches = 1 if running() is None else settings["microbatches"]
    with torch.inference_mode(False), torch.enable_grad():
        package = compile(part, _repeated(tensors, n_microbatches), **settings)
    if out is not None:
        pipe = load(package.write(out))
    else:
        folder = tempfile.TemporaryDirectory(prefix="fxpipe-")
        pipe = load(package.write(Path(folder.name) / type(part).__name__))
        weakref.finalize(pipe, folder.cleanup)
    share(pipe, root)
    return pipe


def _repeated(tensors: Sequence[Tensor], times: int) -> tuple[Tensor, ...]:
    """Copies of the inputs: in a closure they are a micro-batch, of which a batch is made."""
    batch, batched = batch_of(tensors)
    made = with_rows(tensors, batched, [*range(batch)] * times)
    return tuple(tensor.detach().clone() for tensor in made)


def _settings(options: Mapping[str, Any]) -> str:
    return str(sorted((name, str(value)) for name, value in options.items()))


def _refuse_many() -> None:
    n = int(os.environ.get("WORLD_SIZE", 1))
    if dist.is_available() and dist.is_initialized():
        n = dist.get_world_size()
    if n > 1:
        raise InputError(
            f"torch.compile with backend fxpipe makes a pipeline of one process, and each of these "
            f"{n} would compile one and run it whole. Compile once (fxpipe compile MODEL "
            "--allow-graph-breaks, or the part alone), then splice fxpipe.load(OUT, "
            "distributed=True) into the program, or call it in a Runner's closures"
        )


def _check(options: Mapping[str, Any]) -> None:
    unknown = sorted(set(options) - set(_OPTIONS))
    missing = [name for name in ("devices", "microbatches") if name not in options]
    if unknown or missing:
        raise InputError(
            f"the options of backend fxpipe are {', '.join(_OPTIONS)}"
            + (f"; there is no {', '.join(unknown)}" if unknown else "")
            + (f"; {' and '.join(missing)} must be given" if missing else "")
            + ', as in options={"devices": "cpu*2", "microbatches": 4}'
        )
