"""Torch's own schedule runtime running a package's table, on batches as the model takes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from fxpipe.errors import InputError
from fxpipe.runtime import microbatch
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.leaves import in_mode
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.portal import Wire, source_of
from fxpipe.runtime.structure import assemble, imported

Returned = Tensor | tuple[Tensor, ...]

_FORWARD = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")


@dataclass(frozen=True, slots=True)
class Ends:
    """What the model takes and gives, beside what the first stage takes and the last one returns.

    The last stage returns `wires`. A batch has `rows` rows in each micro-batch.
    """

    manifest: Manifest
    wires: tuple[Wire, ...]
    rows: tuple[int, ...]

    def pieces(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> list[tuple[Tensor, ...]]:
        """The input tensors of each micro-batch. Raises InputError for another number of rows."""
        m, batch = len(self.rows), sum(self.rows)
        tensors = microbatch.bind(self.manifest, args, kwargs)
        rows = microbatch.rows_of(self.manifest, tensors, m)
        if tuple(rows) != self.rows and any(spec.batched for spec in self.manifest.inputs):
            raise InputError(
                f"the stages were made for batches of {batch} rows in {m} micro-batches, since "
                f"torch.distributed.pipelining fixes all shapes; found {sum(rows)} rows: give "
                f"{batch}, or call to_torch_pipelining(batch=...) with another multiple of {m}"
            )
        pieces = microbatch.scatter(self.manifest, tensors, rows)
        return [tuple(piece[spec.value] for spec in self.manifest.inputs) for piece in pieces]

    def output(self, returned: Returned) -> Any:
        """The model's output, of what the last stage returned."""
        found = self._by_wire(returned)
        return self._assembled([found[wire] for wire in self._outputs])

    def merged(self, returned: Sequence[Returned]) -> Any:
        """The batch's output, of what the last stage returned for each micro-batch.

        A list of the micro-batches' where they can't be put together.
        """
        if microbatch.unmergeable(self.manifest, training=True) is not None:
            return [self.output(piece) for piece in returned]
        found = [self._by_wire(piece) for piece in returned]
        return self._assembled(
            [
                microbatch.gather(output, [piece[wire] for piece in found], self.rows)
                for output, wire in zip(self.manifest.outputs, self._outputs, strict=True)
            ]
        )

    @property
    def _outputs(self) -> list[Wire]:
        return [Wire(source_of(o.stage), o.value) for o in self.manifest.outputs]

    def _by_wire(self, returned: Returned) -> dict[Wire, Tensor]:
        tensors = (returned,) if isinstance(returned, Tensor) else returned
        return dict(zip(self.wires, tensors, strict=True))

    def _assembled(self, tensors: Sequence[Tensor]) -> Any:
        return assemble(imported(in_mode(self.manifest.output_structure, training=True)), tensors)


class _Share(torch.autograd.Function):
    """A micro-batch's loss, whose gradient counts a share."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, share: float) -> Tensor:
        ctx.share = share
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.share, None


class TableSchedule(_PipelineScheduleRuntime):
    """Torch's runtime with a package's table; its `step` and `eval` are those of torch.

    They take what the model takes, on the first stage's rank, and give what it gives, on the last
    one's. Gradients are those of the mean over the batch of `loss_fn(output, its piece of target)`;
    `losses` gets each micro-batch's own. Without a `loss_fn` there are forwards alone.

    The class, `_load_csv`, `_split_inputs` (where a batch is cut) and `_merge_outputs` (where its
    output is put together) are private in torch.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        ends: Ends,
        table: Path,
        loss_fn: LossFn | None,
        after: Callable[[], None],
    ) -> None:
        """`table` is the file schedule.csv; `after` is called at the end of each step."""
        m = len(ends.rows)

        def share(returned: Returned, target: Any) -> Tensor:
            assert loss_fn is not None
            loss: Tensor = _Share.apply(loss_fn(ends.output(returned), target), 1 / m)  # type: ignore[no-untyped-call]
            return loss

        loss = None if loss_fn is None else share
        # Theirs divides gradients stage by stage: one that two stages share, twice.
        super().__init__(list(stages), m, loss_fn=loss, scale_grads=False)  # type: ignore[no-untyped-call]
        self._ends = ends
        self._after = after
        self._load_csv(str(table))
        self._whole = self.pipeline_order_with_comms
        self._forwards = {
            rank: [action for action in row if action.computation_type.value in _FORWARD]
            for rank, row in self._whole.items()
        }

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Torch's step. Raises InputError, before it begins, for a batch of another size.

        So it does for a `target` that is no tensor, on every rank that is given one: torch cuts it
        as the batch. Where the loss is, there must be one.
        """
        needed = self._loss_fn is not None and any(stage.is_last for stage in self._stages)
        if (needed or target is not None) and not isinstance(target, Tensor):
            raise InputError(
                f"target is {type(target).__name__}: the rank of the last stage gives a tensor, "
                "which torch cuts along its first dimension into micro-batches"
            )
        # Theirs would walk through the backwards, and fail where neighbours share a rank.
        self.pipeline_order_with_comms = self._whole if self._has_backward else self._forwards
        try:
            return super().step(*args, target=target, **kwargs)
        finally:
            self._after()

    def _split_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[list[tuple[Tensor, ...]], list[dict[str, Any]]]:
        m = len(self._ends.rows)
        first = any(stage.is_first for stage in self._stages)
        return self._ends.pieces(args, kwargs or {}) if first else [()] * m, [{}] * m

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        return self._ends.merged(output_chunks)
