"""Costs that are worked out for a device that need not be there, by a model that needs no memory.

The other way to a `Profile` than measuring: the same ops, run on fake tensors, which compute
nothing, under a clock that adds up operations and bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fxpipe.costs.criterion import Criterion
from fxpipe.costs.devices import device_named
from fxpipe.costs.first_microbatch import first_microbatch
from fxpipe.costs.meter import Meter
from fxpipe.costs.roofline import Roofline
from fxpipe.errors import InputError, StageError
from fxpipe.ir import Capture, Network, Profile
from fxpipe.memory import faked, wants_numbers
from fxpipe.ops.interpret import DTYPE, TRAINING, run_graph, untouched


def analytic(
    capture: Capture,
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    n_microbatches: int,
    device: str,
    criterion: Criterion | None = None,
) -> Profile:
    """What each op of the graph, and the loss, costs on one micro-batch of `inputs` on `device`.

    `device` is text such as `analytic:h100`. Of a loss that looks at numbers nothing is known.
    Raises DeviceError if there is no device of that name, InputError if there are more
    micro-batches than rows, if the model does not take so few, or if shapes depend on numbers; as a
    step does, if the criterion is none.
    """
    described = device_named(device)
    cpu, clock = torch.device("cpu"), Roofline(described)
    meter = Meter(capture, capture.modules, cpu, clock)
    loss = None
    with (
        first_microbatch(capture, inputs, n_microbatches) as given,
        untouched(model, capture.state),
        faked(model) as fake,
        fake.mode,
    ):
        model.train()
        state = {name: fake(tensor) for name, tensor in capture.state.items()}
        attributes = {**state, TRAINING: True, DTYPE: capture.dtype}
        try:
            values = [*map(fake, given)]
            outputs = run_graph(capture.graph, capture.modules, attributes, values, meter)
        except RuntimeError as error:
            if not wants_numbers(error):
                raise
            raise InputError(
                f"{capture.model_name} has an op whose result's shape depends on numbers "
                f"({error.func}), which {device} does not compute: measure its ops instead, "
                "without --profile, or by `fxpipe profile` where it will run"
            ) from error
        if criterion is not None:
            try:
                loss = criterion.moved(fake).cost(outputs, clock, cpu)
            except StageError as error:
                if not wants_numbers(error.__cause__):
                    raise
    return Profile(
        costs=meter.costs,
        network=Network(described.link),
        device=described.name,
        capacity_bytes=described.capacity_bytes,
        batch=-(-capture.batch // n_microbatches),
        fingerprint=capture.fingerprint,
        origin=device,
        loss=loss,
    )
