"""Costs that are worked out for a device that need not be there, by a model that needs no memory.

The other way to a `Profile` than measuring: the same ops, run on fake tensors, which compute
nothing, under a clock that adds up operations and bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.costs.criterion import Criterion
from fxpipe.costs.devices import device_named
from fxpipe.costs.first_microbatch import first_microbatch, microbatch
from fxpipe.costs.meter import Meter
from fxpipe.costs.roofline import Roofline
from fxpipe.errors import InputError, StageError
from fxpipe.ir import Capture, Network, Profile
from fxpipe.memory import faked, wants_numbers
from fxpipe.ops.interpret import DTYPE, TRAINING, run_graph, untouched
from fxpipe.quiet import quiet

_MEASURE = "measure its ops instead, without --profile, or by `fxpipe profile` where it will run"


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
    micro-batches than rows, if the model does not take so few, if an op looks at numbers, or
    if torch can't tell its shapes; as a step does, if the criterion is none.
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
        quiet(),
    ):
        model.train()
        state = {name: fake(tensor) for name, tensor in capture.state.items()}
        attributes = {**state, TRAINING: True, DTYPE: capture.dtype}
        at: list[fx.Node] = []

        def noted(node: fx.Node, *op: Any) -> Any:
            at[:] = [node]
            return meter(node, *op)

        def run(tensors: Sequence[Tensor]) -> list[Any]:
            values = [*map(fake, tensors)]
            return run_graph(capture.graph, capture.modules, attributes, values, noted)

        try:
            outputs = run(given)
        except (RuntimeError, ValueError, IndexError) as error:
            if wants_numbers(error):
                raise InputError(
                    f"an op of {capture.model_name} looks at numbers ({error.func}), which "
                    f"{device} does not compute, {_place(capture, *at)}: {_MEASURE}"
                ) from error
            try:
                run(microbatch(capture, inputs, 1, 0))
            except (RuntimeError, ValueError, IndexError) as of_batch:
                raise InputError(
                    f"torch can't run an op of {capture.model_name} by shapes alone, as {device} "
                    f"does, {_place(capture, *at)}: {_MEASURE}\n"
                    f"{type(of_batch).__name__}: {of_batch}"
                ) from of_batch
            raise
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


def _place(capture: Capture, node: fx.Node) -> str:
    source = capture.ops[node.name].source if node.name in capture.ops else None
    return f"at {source or node.name}"
