"""What a model costs: its ops, its loss and the links, measured or worked out for a device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fxpipe.capture import capture as capture_model
from fxpipe.capture import flat_inputs
from fxpipe.costs.criterion import Criterion, Loss
from fxpipe.costs.first_microbatch import check_sizes, fitting
from fxpipe.ir import Capture, Profile
from fxpipe.passes.analytic import analytic
from fxpipe.passes.profile import profile as profile_ops
from fxpipe.runtime.stream import Device
from fxpipe.settings import check_blocks, check_costs, check_profile


def costed(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    devices: Sequence[Device],
    counts: Sequence[int],
    loss: Loss | None,
    profile: Profile | str | None,
    progress: Callable[[str], None],
) -> tuple[Capture, dict[int, Profile]]:
    """What `compile` plans by: the graph of `model`, and the costs of its ops, loss and links.

    These are of each of the `counts` of micro-batches that the graph holds for. They are measured
    here on `devices`, or those of a `profile` that fits, or, where that is text such as
    `analytic:h100`, worked out for that device. Raises PlanError if there are more devices than
    blocks, and InputError if the graph holds for none of the counts.
    """
    check_costs(model, profile)
    progress("capture")
    captured = capture_model(model, args, kwargs)
    check_blocks(captured, len(devices))
    progress("profile")
    inputs = flat_inputs(model, args, kwargs)
    costs = {
        count: priced(captured, model, inputs, profile, count, devices, loss)
        for count in fitting(captured, counts)
    }
    return captured, costs


def priced(
    capture: Capture,
    model: nn.Module,
    inputs: Sequence[Tensor],
    profile: Profile | str | None,
    microbatches: int,
    devices: Sequence[Device],
    loss: Loss | None,
    apart: bool = False,
) -> Profile:
    """The given profile if it fits, or one as asked for; `apart`, of a process per device.

    Raises InputError if the graph does not hold for the micro-batches.
    """
    check_sizes(capture, microbatches)
    if isinstance(profile, Profile):
        check_profile(profile, capture, microbatches)
        return profile
    criterion = loss and Criterion.of(capture, loss, microbatches)
    given = capture, model, inputs
    if profile is None:
        return profile_ops(
            *given, n_microbatches=microbatches, devices=devices, criterion=criterion, apart=apart
        )
    return analytic(*given, n_microbatches=microbatches, device=profile, criterion=criterion)
