"""A stage's random ops draw from its micro-batch's stream.

Torch's CPU generator is one for the process while several lanes run at once, so each random op puts
the micro-batch's state in for as long as it takes. To look at each op costs more than many ops do:
so a module's first forward is looked at op by op, and tells which of torch's functions draw, and
which layers call them; in later ones only these are looked into.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxpipe.runtime.drawing_layers import Entered, layers_draw
from fxpipe.runtime.random import Numbers, RandomStream


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
# By module and mode, training or not, in which all that it draws with is known: the layers that
# draw, or None where functions do elsewhere.
_KNOWN: WeakKeyDictionary[nn.Module, dict[bool, WeakSet[nn.Module] | None]] = WeakKeyDictionary()


@contextmanager
def drawing(
    start: RandomStream,
    device: torch.device,
    module: nn.Module | None = None,
    whole: bool = True,
    fixed: bool = True,
) -> Iterator["Draws"]:
    """Let the block's random ops draw from `start`; the mode's `end` is where they came to.

    The block is a forward of `module`, if one is given, or a part of one. `fixed` says that each
    forward in the same mode calls the same functions.
    """
    draws = Draws(start, device)
    known = {} if module is None else _KNOWN.get(module, {})
    if module is not None and module.training in known:
        layers = known[module.training]
        if layers is None:
            with layers_draw(None, ()), _Functions(draws):
                yield draws
        else:
            with layers_draw(draws, layers):
                yield draws
        return
    entered = Entered(module)
    learning = _Learning(draws, entered)
    with layers_draw(None, ()), entered.watching(), draws, learning:
        yield draws
    if module is not None and whole and learning.seen == draws.count:
        compiled = module._compiled_call_impl is not None
        elsewhere = learning.elsewhere or compiled or not fixed
        _KNOWN.setdefault(module, {})[module.training] = None if elsewhere else learning.layers


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Swaps the generators' states around each random op, and counts these."""

    def __init__(self, start: RandomStream, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._numbers = Numbers(start)
        self._own = [device]
        # An op of a CUDA stage may draw on the CPU too, as `torch.randn(...).to(device)` does.
        cpu = torch.device("cpu")
        self._all = [cpu] if device == cpu else [cpu, device]

    @property
    def end(self) -> RandomStream:
        """Where the block's numbers came to."""
        return self._numbers.end

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
        self._numbers.take(self._all)
        try:
            return op()
        finally:
            self.finish()

    def begin(self) -> None:
        """Let what follows draw from the stream, on the stage's own device, until `finish`."""
        self._numbers.take(self._own)

    @property
    def begun(self) -> bool:
        """Whether something draws from the stream now."""
        return self._numbers.taken

    def finish(self) -> None:
        """Let torch's own generators go on where they stood."""
        self._numbers.give_back()


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
    """Adds the functions that draw to those known; `seen` is how often they drew.

    `layers` are those of torch's whose functions draw, `elsewhere` whether others do.
    """

    def __init__(self, draws: Draws, entered: Entered) -> None:
        super().__init__()
        self.seen = 0
        self.layers: WeakSet[nn.Module] = WeakSet()
        self.elsewhere = False
        self._draws = draws
        self._entered = entered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        before = self._draws.count
        result = func(*args, **(kwargs or {}))
        drawn = self._draws.count - before
        self.seen += drawn
        if drawn and func not in _DRAWING:
            _COMPOSED.add(func)
        draws = _DRAWING.get(func)
        if func in _COMPOSED:
            self.elsewhere = True  # other work is between its draws
        elif draws is not None and draws(args, kwargs or {}):
            if self._entered.layer is None:
                self.elsewhere = True
            else:
                self.layers.add(self._entered.layer)
        return result
