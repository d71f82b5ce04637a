"""What other ranks hold too of this rank's weights: kept equal, and their gradients summed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.errors import InputError
from fxpipe.runtime.distributed.dtensors import is_cut
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.distributed.replicas import Replicas
from fxpipe.runtime.distributed.shards import Shards
from fxpipe.runtime.distributed.shared_weights import SharedWeights, first_names
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.stage import Stage


class RankWeights:
    """Those of one rank, whose stages are `stages`.

    With replicas of the pipeline they have them all: whole, or each a share once `shard` was
    called. `order` are the stages in the order in which their gradients are done.
    """

    def __init__(
        self,
        manifest: Manifest,
        stages: Sequence[Stage],
        ranks: Ranks,
        order: Sequence[int],
        fully_shard: bool,
    ) -> None:
        """All ranks make theirs together."""
        self._stages = stages
        self._ranks = ranks
        self._first = first_names(manifest)
        self._shared = SharedWeights(manifest, stages, ranks, fully_shard)
        self.replicas: Replicas | None = None
        if ranks.dp > 1:
            names = [each.name for each in self._shared.shared]
            self.replicas = Replicas(ranks, stages, order, self._first, names)
        self.shards: Shards | None = None

    def equalize(self, parameters: Mapping[str, nn.Parameter], held: Sequence[Tensor]) -> None:
        """Give what several ranks hold, of all that is `held`, the values of the first of them."""
        if self.replicas is not None:
            self.replicas.equalize([tensor for tensor in held if not is_cut(tensor)])
        self._shared.equalize(parameters)

    def shard(self, mesh: DeviceMesh) -> Mapping[str, nn.Parameter]:
        """Share parameters out over the replicas, which are equal; gives this rank's shares."""
        self.shards = Shards(self._ranks, self._stages, self._first, mesh)
        return self.shards.parameters

    @contextmanager
    def collected(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """For `step`: when the block ends, gradients are summed over all ranks that share them."""
        with ExitStack() as stack:
            if self.shards is not None:
                total = partial(self._shared.sum_shares, parameters)
                stack.enter_context(self.shards.collected(parameters, total))
            else:
                if self.replicas is not None:
                    stack.enter_context(self.replicas.collected())
                stack.enter_context(self._shared.collected(parameters))
            yield

    def refuse_hooks(self, module: nn.Module) -> None:
        """Raise InputError if a share in `module` has a hook: no backward ends in one.

        Once a gradient is summed over the replicas, FSDP runs the post-accumulate hooks of what is
        cut; of a tie the other ranks' gradients are still to come.
        """
        if self.shards is None:
            return
        tied = {each.name for each in self._shared.shared}
        for name, parameter in module.named_parameters():
            accumulates = getattr(parameter, "_post_accumulate_grad_hooks", None)
            runs = is_cut(parameter) and self._first[name] not in tied
            if parameter._backward_hooks or (accumulates and not runs):
                raise InputError(
                    f"{name} has a hook, which would not run on its whole gradient, as that comes "
                    "to shares of it on the replicas: change its .grad after step, or load without "
                    "fully_shard"
                )

    def refuse_other_dtypes(
        self, fn: Callable[[Tensor], Tensor], parameters: Sequence[Tensor]
    ) -> None:
        """Raise InputError if `fn` changes dtypes of what was gathered already."""
        if self.shards is None or not self.shards.gathered:
            return
        for dtype in {parameter.dtype for parameter in parameters}:
            if fn(torch.empty(0, dtype=dtype)).dtype != dtype:
                raise InputError(
                    "a sharded pipeline's dtype can't change after the first call: change it "
                    "right after load(), or load again"
                )

    def training_factor(self, factor: float) -> float:
        """What training holds besides each byte of a stage's parameters, `factor` if whole."""
        if self.shards is None:
            return factor
        # What was gathered, its gradients, and shares of all.
        return 1 + (1 + factor) / self._ranks.dp
