"""A pipeline over processes: each rank holds its device's stages and runs its row of the table."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from fxpipe.errors import FxpipeError, InputError, WeightsError
from fxpipe.runtime import microbatch
from fxpipe.runtime.ambient import without_autocast
from fxpipe.runtime.closure import running
from fxpipe.runtime.distributed.agreement import refuse_unloadable
from fxpipe.runtime.distributed.engine import RankEngine
from fxpipe.runtime.distributed.entry import Meeting, place_of
from fxpipe.runtime.distributed.norm import gradients_here, norm_over
from fxpipe.runtime.distributed.overflow import share_overflow
from fxpipe.runtime.distributed.progress import EVALUATION
from fxpipe.runtime.distributed.replicas import trains_nothing
from fxpipe.runtime.distributed.results import give_gradients, shared_loss
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.step import Step
from fxpipe.runtime.structure import rebuild
from fxpipe.runtime.weights.saving import save


class DistributedPipeline(RankEngine):
    """This rank's part of a compiled model; all ranks call its methods together.

    `state_dict`, `parameters` and so on have what this rank's stages use, under the original names.
    Each rank is given the inputs that its stages read, or all: others may be None or left out.
    """

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The original model's output for a batch, without gradients.

        It comes on the last stage's rank, None on others; loaded with `outputs="all"`, on all. In a
        closure of a `Runner` all ranks give its inputs and get its output, with gradients too.
        Raises InputError, StageError.
        """
        if running() is not None:
            return super().forward(*args, **kwargs)
        self._refuse_inside()
        self._ranks.progress.begin(EVALUATION)
        inputs, meeting = self._meet("as pipe(...)", args, kwargs, refuse=self._refuse_call)

        def evaluate(meeting: Meeting) -> list[Any] | None:
            with self._ranks.telling():
                rows, call = self._enter(inputs, meeting)
                step = Step(call, lambda i: None, frozenset())
                self._run_row(step, call, meeting, backward=False)
                leaves = self._merged(call, inputs, rows) if self.is_last else None
                if not self._gives_all:
                    return leaves
                return self._transport.gather(self._ranks.gather, leaves or [])[self._homes[-1]]

        leaves = self._entry.run(evaluate, meeting)
        return None if leaves is None else rebuild(self._structure(), leaves)

    def step(
        self,
        *args: object,
        target: Any = None,
        loss_fn: LossFn,
        scaler: GradScaler | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Forward and backward of one training step: `Pipeline.step`, by all ranks together.

        Inputs are read where a stage takes them, `target` where the last stage is; elsewhere they
        may be None, or left out. Each replica has a batch of its own; loss and gradients, which all
        get, are those of the mean over all replicas' rows, and `loss_fn` trains nothing of its own.
        Raises InputError, alike on all ranks, if they weren't called with the same; StageError that
        names the rank if one fails.
        """
        self._refuse_inside()
        scaled = scaler is not None and scaler.is_enabled()
        self._ranks.progress.begin("step")
        what = "as pipe.step(..., scaler=scaler)" if scaled else "as pipe.step(...)"
        refuse = self._refuse_step
        inputs, meeting = self._meet(what, args, kwargs, place_of(loss_fn), refuse=refuse)
        alone = partial(trains_nothing, loss_fn) if self._ranks.dp > 1 else loss_fn

        def train(meeting: Meeting) -> Tensor:
            with self._ranks.telling():
                rows, call = self._enter(inputs, meeting)
                step, objective = self._new_step(call, rows, meeting.batch, target, alone, scaler)
                with self._collected():
                    self._run_row(step, call, meeting, backward=True)
                wanted = {k for k, wants in enumerate(meeting.given.gradients) if wants}
                if wanted:
                    found = self._input_gradients(step, inputs, rows)
                    shared = {k for k in wanted if not self._manifest.inputs[k].batched}
                    with without_autocast():
                        give_gradients(inputs, found, shared, self._ranks, self._transport)
                if scaler is not None and scaled:
                    share_overflow(scaler, [*self.parameters()], self._ranks)
                loss = objective.loss() if self.is_last else None
                return shared_loss(loss, self._ranks, self._transport.device)

        return self._entry.run(train, meeting)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, around: Iterable[Tensor] = ()
    ) -> Tensor:
        """Scale all ranks' gradients down so that their norm over all is at most `max_norm`.

        Returns the norm that they had. What several ranks hold counts once, and so does `around`,
        which all have with equal gradients.
        """
        gradients = gradients_here(self._manifest, self._ranks, dict(self.named_parameters()))
        held = set(self.parameters())
        others = [tensor for tensor in dict.fromkeys(around) if tensor not in held]
        if self._ranks.world_rank == 0:
            gradients += [tensor.grad for tensor in others if tensor.grad is not None]
        self._ranks.progress.begin("clip_grad_norm_")
        with self._ranks.telling():
            total = norm_over(self._ranks, gradients, norm_type)
        nn.utils.clip_grads_with_norm_([*self.parameters(), *others], max_norm, total)
        return total

    def load_weights(self, path: str | Path, strict: bool = True) -> None:
        """Load safetensors: `Pipeline.load_weights`, by all ranks together.

        Each reads what it holds. Raises WeightsError, alike on all, with what keeps each rank from
        it; then no rank has loaded anything.
        """
        self._ranks.progress.begin("load_weights")
        with self._ranks.telling():
            problems = self._load_agreed(path, strict, self._ranks.gather_world)
        refuse_unloadable(problems)

    def save_weights(self, path: str | Path, max_shard_size: int | str = "5GB") -> None:
        """Write all ranks' weights: `Pipeline.save_weights`, by all together.

        Each writes its own shards into a folder that they share; a single file is written by the
        first, to which the others hand their tensors one by one. One owner writes what several
        hold. Raises InputError and WeightsError, alike on all ranks.
        """
        problem: FxpipeError | None = None
        self._ranks.progress.begin("save_weights")
        with self._ranks.telling():
            try:
                save(Path(path), self._owned(), max_shard_size, self._ranks)
            except (InputError, WeightsError) as error:
                problem = error
        if problem is not None:
            raise problem

    def _refuse_call(self) -> None:
        """Raise InputError where a call would have to make a graph, or can't be put together."""
        if torch.is_grad_enabled():
            raise InputError(
                "over several processes a call makes no graph: train with step() or a Runner, or "
                "call the pipeline under torch.no_grad()"
            )
        microbatch.refuse_unmergeable(self._manifest, self.training)

    def __repr__(self) -> str:
        return f"rank {self._ranks.rank} of {self._ranks.size}: {super().__repr__()}"
