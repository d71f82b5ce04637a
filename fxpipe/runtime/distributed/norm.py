"""The norm of all ranks' gradients, each counted once."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fxpipe.runtime.distributed.dtensors import is_cut, local
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.distributed.shared_weights import first_names, holders
from fxpipe.runtime.manifest import Manifest


def gradients_here(
    manifest: Manifest, ranks: Ranks, parameters: Mapping[str, nn.Parameter]
) -> list[Tensor]:
    """Of this rank's `parameters` the gradients, or shares of them, that no other rank counts."""
    owned, first = holders(manifest), first_names(manifest)
    return [
        local(parameter.grad)
        for name, parameter in parameters.items()
        if parameter.grad is not None
        and owned[first[name]][0] == ranks.rank
        and (ranks.replica == 0 or is_cut(parameter))
    ]


def norm_over(ranks: Ranks, gradients: Iterable[Tensor], norm_type: float) -> Tensor:
    """The norm over what each of all ranks gives; all ask for it together."""
    present: Sequence[Tensor] = [gradient for gradient in gradients if gradient.numel()]
    own = float(nn.utils.get_total_norm(present, norm_type))
    norms = torch.tensor(ranks.gather_world(own), dtype=torch.float64)
    total: Tensor = torch.linalg.vector_norm(norms, norm_type)
    return total
