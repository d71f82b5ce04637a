"""What a model costs: its ops, its loss and the links, measured or worked out for a device."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fxpipe.capture import capture as capture_model
from fxpipe.capture import flat_inputs
from fxpipe.criterion import Criterion, Loss
from fxpipe.ir import Capture, Chain, Profile
from fxpipe.passes.analytic import analytic
from fxpipe.passes.linearize import linearize
from fxpipe.passes.profile import profile as profile_ops
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.stream import Device, Devices, parse_devices
from fxpipe.settings import check_costs, check_profile


class Line:
    """Tells which pass runs and keeps how long each took."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """The block is the pass of that name."""
        self._progress(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def measure(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Devices,
    microbatches: int,
    loss_fn: LossFn | None = None,
    target: Any = None,
    profile: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """What `compile` plans by: the costs of `model`'s ops, the loss, and the links of `devices`.

    They are measured here, or, with `profile` such as `analytic:h100`, worked out for that device.
    """
    line = Line(progress)
    loss = Loss.of(loss_fn, target)
    return _costed(model, args, kwargs or {}, devices, microbatches, loss, profile, line)[1]


def chained(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Devices,
    microbatches: int,
    loss_fn: LossFn | None = None,
    target: Any = None,
    profile: Profile | str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Chain, Profile]:
    """What `compile` plans: the chain of `model`'s blocks, and the costs that are in it."""
    line = Line(progress)
    given = args, kwargs or {}
    loss = Loss.of(loss_fn, target)
    captured, found = _costed(model, *given, devices, microbatches, loss, profile, line)
    with line("linearize"):
        return linearize(captured, found), found


def _costed(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    devices: Devices,
    microbatches: int,
    loss: Loss | None,
    profile: Profile | str | None,
    line: Line,
) -> tuple[Capture, Profile]:
    """The model's graph and what its ops cost."""
    lanes = parse_devices(devices)
    check_costs(model, profile)
    with line("capture"):
        captured = capture_model(model, args, kwargs)
    with line("profile"):
        inputs = flat_inputs(model, args, kwargs)
        return captured, priced(captured, model, inputs, profile, microbatches, lanes, loss)


def priced(
    capture: Capture,
    model: nn.Module,
    inputs: Sequence[Tensor],
    profile: Profile | str | None,
    microbatches: int,
    devices: Sequence[Device],
    loss: Loss | None,
) -> Profile:
    """The given profile if it fits, or one as asked for."""
    if isinstance(profile, Profile):
        check_profile(profile, capture, microbatches)
        return profile
    criterion = loss and Criterion.of(capture, loss, microbatches)
    given = capture, model, inputs
    if profile is None:
        return profile_ops(
            *given, n_microbatches=microbatches, devices=devices, criterion=criterion
        )
    return analytic(*given, n_microbatches=microbatches, device=profile, criterion=criterion)
