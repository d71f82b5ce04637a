"""Recomputation of a part of a stage: `x = checkpoint(self.h[3], x)` in the stage's own code.

The part runs with its graph at once, but of the tensors that its backward needs it keeps no more
than places. When the first is asked for, the part runs again and fills them all; each is let go
when autograd is done with it. So a part is computed again once, be its backward whole or in halves.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fxpipe.errors import StageError
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.drawing import Draws, drawing
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.recomputing import recomputing, versions
from fxpipe.runtime.swapping import swapped
from fxpipe.runtime.written import Written


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose backward computes it again; until then it keeps `args` alone.

    `function` is a module of a stage, or a method; `args` are tensors, lists of them, and what has
    no gradient. It writes none of them in place, draws the same random numbers again, and counts
    nothing twice. Outside of a pipeline, and in what torch.compile makes, this is torch's own
    checkpoint. Raises StageError, in backward, where the part does not compute the same again.
    """
    # Whether Dynamo traces this: `is_compiling` is true on all lanes while one of them compiles.
    forward = None if torch.compiler.is_dynamo_compiling() else _THREAD.forward
    if forward is None:
        own = [list(arg) if isinstance(arg, list) else arg for arg in args]  # lists may grow
        return torch_checkpoint(function, *own, use_reentrant=False)
    if not forward.recomputes or not torch.is_grad_enabled():
        return function(*args)
    segment = _Segment(function, args, forward)
    with saved_tensors_hooks(segment.keep, _asked), forward.running(recomputes=False):
        return function(*args)


class Forward:
    """A stage's forward on one micro-batch: what it takes to run a part of it again.

    That is, besides the part's inputs: random numbers, the buffers `written`, as they were, and the
    tensors that stand in for tied parameters. No two parts write the same buffer. `again()` is
    around what runs again. Within a part nothing `recomputes` by itself.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        written: Sequence[str],
        draws: Draws | None,
        again: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.recomputes = False
        self._module = module
        self._device = device
        self._written = written
        self._draws = draws
        self._again = again
        self._before: Written | None = None
        self._bound: dict[str, Tensor] = {}

    def running(self, recomputes: bool) -> "_Running":
        """The block is of this forward."""
        return _Running(self, recomputes)

    def remember(self) -> RandomStream | None:
        """Take down what the parts begin with; returns where the random numbers stand."""
        if self._before is None:
            self._before = Written(self._module, self._written)
            parameters = self._module.named_parameters(remove_duplicate=False)
            self._bound = {name: p for name, p in parameters if not isinstance(p, nn.Parameter)}
        return None if self._draws is None else self._draws.end

    @contextmanager
    def rerunning(self, random: RandomStream | None, ambient: Ambient) -> Iterator[None]:
        """The block is a part of it, run again."""
        assert self._before is not None
        drawn: AbstractContextManager[Draws | None] = nullcontext()
        if random is not None:
            drawn = drawing(random, self._device, self._module, whole=False)
        with (
            self._again(),
            recomputing(ambient),
            # The live buffers hold later micro-batches' values and must not count this one twice.
            self._before.again(),
            swapped(self._module, "_parameters", self._bound),
            drawn,
            self.running(recomputes=False),
        ):
            yield


class _Running:
    """Around a block of `forward`. No generator: each action of a stage enters one."""

    __slots__ = ("_before", "_forward", "_recomputes")

    def __init__(self, forward: Forward, recomputes: bool) -> None:
        self._forward = forward
        self._recomputes = recomputes

    def __enter__(self) -> None:
        self._before = _THREAD.forward, self._forward.recomputes
        _THREAD.forward, self._forward.recomputes = self._forward, self._recomputes

    def __exit__(self, *_: object) -> None:
        _THREAD.forward, self._forward.recomputes = self._before


class _Thread(threading.local):
    forward: Forward | None = None


_THREAD = _Thread()


class _Place:
    """Stands in the graph for a tensor, which it has once that is computed again."""

    __slots__ = ("__weakref__", "segment", "tensor")

    def __init__(self, segment: "_Segment") -> None:
        self.segment = segment
        self.tensor: Tensor | None = None


class _Segment:
    """A part of a forward that was run, and what it takes to run it again."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], forward: Forward) -> None:
        self._function = function
        self._args = [_leaf(arg) for arg in args]
        self._before = self._versions()
        self._forward = forward
        self._random, self._ambient = forward.remember(), Ambient.capture()
        self._places: list[weakref.ref[_Place]] = []
        self._lock = threading.Lock()  # autograd may ask from a thread for each device
        self._filled = False

    def keep(self, tensor: Tensor) -> Tensor | _Place:
        """What the graph keeps in place of `tensor`: parameters are there in any case."""
        if isinstance(tensor, nn.Parameter):
            return tensor
        place = _Place(self)
        self._places.append(weakref.ref(place))
        return place

    def fill(self) -> None:
        """Compute the tensors of all places that are still wanted. Raises StageError."""
        with self._lock:
            if self._filled:
                return
            if self._versions() != self._before:
                raise self._error("an input of it is written in place after it was read")
            waiting = iter(self._places)
            count = 0

            def found(tensor: Tensor) -> Tensor:
                nonlocal count
                if not isinstance(tensor, nn.Parameter):
                    count += 1
                    # Detached: an op's own result that its node held would hold the node.
                    tensor = tensor.detach()
                    place = next(waiting, _gone)()
                    if place is not None:
                        place.tensor = tensor
                return tensor

            with (
                self._forward.rerunning(self._random, self._ambient),
                saved_tensors_hooks(found, _same),
            ):
                self._function(*self._args)
            if count != len(self._places):
                raise self._error(
                    f"its backward needs {len(self._places)} tensors, computed again it has {count}"
                )
            self._args.clear()
            self._places.clear()
            self._filled = True

    def _versions(self) -> list[int]:
        return versions([*_tensors(self._args)])

    def _error(self, reason: str) -> StageError:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return StageError(
            f"{name} can't be computed again, {reason}: call it without checkpoint(...) in the "
            "stage's file"
        )


def _asked(kept: Tensor | _Place) -> Tensor:
    """The tensor that backward asks for."""
    if isinstance(kept, Tensor):
        return kept
    if kept.tensor is None:
        kept.segment.fill()
    assert kept.tensor is not None
    return kept.tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _gone() -> None:
    return None


def _leaf(arg: Any) -> Any:
    """An argument as it is now, without its history. A parameter has none, and is itself."""
    if isinstance(arg, Tensor) and not isinstance(arg, nn.Parameter):
        return arg.detach().requires_grad_(arg.requires_grad)
    return [*map(_leaf, arg)] if isinstance(arg, list) else arg


def _tensors(args: Any) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list):
            yield from _tensors(arg)
