"""What all ranks know of a step from the package alone: each one's row, and messages' shapes."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from fxpipe.runtime.distributed.check_messages import check_messages
from fxpipe.runtime.distributed.foreseen import by_clock, planned
from fxpipe.runtime.distributed.gathers import with_gathers
from fxpipe.runtime.distributed.leaving import with_leaves
from fxpipe.runtime.distributed.meeting import Given
from fxpipe.runtime.distributed.messages import Message, Row, Send, first_of
from fxpipe.runtime.distributed.posting import with_posts
from fxpipe.runtime.distributed.reductions import reduction_order, with_reductions
from fxpipe.runtime.distributed.routes import rank_rows
from fxpipe.runtime.manifest import Manifest, TensorSpec
from fxpipe.runtime.portal import CALLER, Wire, Wires
from fxpipe.runtime.room import held_during
from fxpipe.runtime.stage import Stage
from fxpipe.schedule import Schedule


class RankPlan:
    """The rows of the ranks, by how many micro-batches there are and what is to be done.

    With `reduces` a step's rows say when gradients are summed over replicas, by rank in the `order`
    of its stages; with `gathers` all say when parameters are gathered. Raises ScheduleError if they
    can't run to their ends.
    """

    def __init__(
        self,
        manifest: Manifest,
        stages: Sequence[Stage],
        schedule: Schedule,
        wires: Mapping[bool, Wires],
        reduces: bool,
        gathers: bool,
    ) -> None:
        self._schedule = schedule
        self._stages = stages
        batch = -(-manifest.batch // manifest.microbatches)
        self._planned: dict[str, int] = {**manifest.sizes, "batch": batch}
        self.order = [reduction_order(row) for row in schedule.rows]
        self._reduces = reduces
        self._gathers = gathers
        self._wires = wires
        self._ranks = manifest.stage_to_device
        self._estimate = manifest.estimate
        self._ahead_bytes = manifest.estimate.ahead_bytes or (0,) * len(schedule.rows)
        self._draws = [j for j, stage in enumerate(manifest.stages) if stage.random]
        self._specs = {Wire(CALLER, value.value): value.spec for value in manifest.inputs} | {
            Wire(j, output.value): output.spec
            for j, stage in enumerate(manifest.stages)
            for output in stage.outputs
        }
        self._rows: dict[tuple[int, bool, bool, bool], tuple[Row, ...]] = {}
        check_messages(self.rows(manifest.microbatches, training=True, backward=True))

    def wires(self, training: bool) -> Wires:
        """Those of all ranks."""
        return self._wires[training]

    def rows(
        self, m: int, training: bool, backward: bool, everywhere: bool = False
    ) -> tuple[Row, ...]:
        """Each rank's row for m micro-batches; without `backward`, of forwards alone.

        With `everywhere`, the caller and the pipeline's end are on each rank.
        """
        key = m, training, backward, everywhere
        if key not in self._rows:
            table = self._schedule if backward else self._schedule.forwards()
            # All replicas gather alike, whatever their micro-batches: as in the whole table.
            whole, table = table if self._gathers else table.first(m), table.first(m)
            wires = self._wires[training]
            rows = rank_rows(whole, wires, self._ranks, self._draws, everywhere)
            if self._gathers:
                rows = tuple(map(with_gathers, rows))
            if backward and self._reduces:
                rows = tuple(map(with_reductions, rows, self.order))
            rows = tuple(first_of(row, m) for row in rows)
            held = self._held(table, backward)
            foreseen = planned(self._estimate, table) if backward else None
            foreseen = foreseen or by_clock(table)
            rows = with_posts(rows, foreseen, held, self._ahead_bytes, self._bytes)
            self._rows[key] = with_leaves(rows, foreseen, self._bytes)
        return self._rows[key]

    @property
    def routes(self) -> set[tuple[int, int]]:
        """The source and target of all messages."""
        m = self._schedule.n_microbatches
        rows = [*self.rows(m, True, True), *self.rows(m, False, False)]
        sends = [item.message for row in rows for item in row if isinstance(item, Send)]
        return {(message.source, message.target) for message in sends}

    def _held(self, table: Schedule, backward: bool) -> list[list[float]]:
        """The bytes that each rank's stages hold during each of its actions, as planned."""
        if backward:
            return [[*held_during(table, row, self._stages, 1.0, 0.0)] for row in table.rows]
        return [[self._stages[a.stage].spec.received_bytes for a in row] for row in table.rows]

    def _bytes(self, message: Message) -> int:
        """As planned; random numbers are few."""
        return 0 if message.wire is None else self._specs[message.wire].bytes(self._planned)

    def shape(self, given: Given, message: Message) -> tuple[int, ...] | None:
        """The shape of a value or gradient, None if it depends on data."""
        assert message.wire is not None
        spec = self._specs[message.wire]
        if spec.of_data:
            return None
        return _sizes(spec, (*given.sizes, ("batch", given.rows[message.microbatch])))


@lru_cache(maxsize=4096)
def _sizes(spec: TensorSpec, values: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    return spec.sizes(dict(values))
