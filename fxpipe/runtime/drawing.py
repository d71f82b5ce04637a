"""A stage's random ops draw from its micro-batch's stream.

Torch's CPU generator is one for the process while several lanes run at once, so each random op puts
the micro-batch's state in for as long as it takes. To look at each op costs more than many ops do:
so a module's first forward is looked at op by op, and tells which of torch's functions draw; in
later ones only these are looked into.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.runtime import stream
from fxpipe.runtime.random import LOCK, RandomStream


def _always(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return True


def _drops(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `F.scaled_dot_product_attention` draws with these arguments.

    To swap the generators' states for as long as it takes keeps other lanes from drawing; to look
    into it takes longer, since its dropout makes it a composition of some thirty ops.
    """
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


# Functions that run under one exchange of states where they draw; whether they do with these
# arguments.
_DRAWING: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], bool]] = {
    getattr(home, name): _always
    for home, names in (
        (torch, "rand randn randint randperm bernoulli multinomial normal poisson binomial"),
        (torch, "rand_like randn_like randint_like"),
        (Tensor, "bernoulli bernoulli_ multinomial uniform_ normal_ random_ exponential_"),
        (Tensor, "geometric_ log_normal_ cauchy_"),
        (F, "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu"),
    )
    for name in names.split()
}
_DRAWING[F.scaled_dot_product_attention] = _drops
# Those that draw, or may, between other work; more are learnt.
_COMPOSED: set[Any] = {
    *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, F.gumbel_softmax),
    F.multi_head_attention_forward,
}
# The modes, training or not, in which all that a module draws with is known.
_KNOWN: WeakKeyDictionary[nn.Module, set[bool]] = WeakKeyDictionary()


@contextmanager
def drawing(
    start: RandomStream,
    device: torch.device,
    module: nn.Module | None = None,
    whole: bool = True,
) -> Iterator["Draws"]:
    """Let the block's random ops draw from `start`; the mode's `end` is where they came to.

    The block is a forward of `module`, if one is given, or a part of one.
    """
    draws = Draws(start, device)
    if module is not None and module.training in _KNOWN.get(module, ()):
        with _Functions(draws):
            yield draws
        return
    learning = _Learning(draws)
    with draws, learning:
        yield draws
    if module is not None and whole and learning.seen == draws.count:
        _KNOWN.setdefault(module, set()).add(module.training)


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Swaps the generators' states around each random op, and counts these."""

    def __init__(self, start: RandomStream, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.end = start
        self.count = 0
        # An op of a CUDA stage may draw on the CPU too, as `torch.randn(...).to(device)` does.
        cpu = torch.device("cpu")
        self._devices: Sequence[torch.device] = [cpu] if device == cpu else [cpu, device]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an op."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        self.count += 1
        return self.run(lambda: func(*args, **(kwargs or {})))

    def run(self, op: Callable[[], Any]) -> Any:
        """Let `op` draw from the stream."""
        generators = [stream.generator(device) for device in self._devices]
        with LOCK:
            before = [generator.get_state() for generator in generators]
            for generator, device in zip(generators, self._devices, strict=True):
                generator.set_state(self.end.state(device))
            try:
                return op()
            finally:
                states = {
                    device.type: generator.get_state()
                    for generator, device in zip(generators, self._devices, strict=True)
                }
                self.end = replace(self.end, states=states)
                for generator, state in zip(generators, before, strict=True):
                    generator.set_state(state)


class _Functions(TorchFunctionMode):
    """Runs those functions under `draws` that are known to draw."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        draws = _DRAWING.get(func)
        if draws is not None and draws(args, kwargs or {}):
            return self._draws.run(lambda: func(*args, **(kwargs or {})))
        if func not in _COMPOSED:
            return func(*args, **(kwargs or {}))
        with self._draws:
            return func(*args, **(kwargs or {}))


class _Learning(TorchFunctionMode):
    """Adds the functions that draw to those known; `seen` is how often they drew."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.seen = 0
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        before = self._draws.count
        result = func(*args, **(kwargs or {}))
        drawn = self._draws.count - before
        self.seen += drawn
        if drawn and func not in _DRAWING:
            _COMPOSED.add(func)
        return result
