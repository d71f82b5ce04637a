"""What every rank gets at a step's end: its loss, and the gradients of its inputs."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from fxpipe.runtime.distributed.layout import DTYPES
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.distributed.transport import Transport
from fxpipe.runtime.portal import add_gradients


def give_gradients(
    inputs: Sequence[Tensor | None],
    found: list[Tensor | None],
    shared: Collection[int],
    ranks: Ranks,
    transport: Transport,
) -> None:
    """Give each input the sum of what the stages of all ranks that read it `found`.

    Of those whose numbers are in `shared` all replicas have the same one.
    """
    everywhere = transport.gather(ranks.gather, found)
    totals = [add_gradients([part[k] for part in everywhere]) for k in range(len(inputs))]
    if shared and ranks.dp > 1:
        own = [total if k in shared else None for k, total in enumerate(totals)]
        replicas = transport.gather(ranks.gather_world, own)[:: ranks.size]
        for k in shared:
            totals[k] = add_gradients([part[k] for part in replicas])
    for tensor, total in zip(inputs, totals, strict=True):
        if tensor is not None and total is not None:
            torch.autograd.backward([tensor], [total])


def shared_loss(loss: Tensor | None, ranks: Ranks, device: torch.device) -> Tensor:
    """The sum of the replicas' losses, in the dtype it has where the last stage is.

    `loss` is this replica's there, None elsewhere.
    """
    own = [-1.0, 0.0] if loss is None else [DTYPES.index(loss.dtype), loss.item()]
    losses = [
        torch.tensor(value, dtype=DTYPES[int(number)], device=device)
        for number, value in ranks.gather_numbers(own)
        if number >= 0
    ]
    return torch.stack(losses).sum()
