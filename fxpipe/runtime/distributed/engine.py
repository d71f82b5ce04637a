"""What runs a rank's part of a compiled model: its row, and what it shares with others.

The engine is that of one process: the same `Step` runs each action. What goes to a stage of another
rank lands in the call's outbox and is sent once the action is done.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Literal, NoReturn, Self

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.errors import InputError
from fxpipe.runtime import microbatch, stream
from fxpipe.runtime.call import Call
from fxpipe.runtime.distributed import visits as rank_visits
from fxpipe.runtime.distributed.around import equalize_around, names_around
from fxpipe.runtime.distributed.device import room_bytes
from fxpipe.runtime.distributed.dtensors import share_of
from fxpipe.runtime.distributed.entry import Entry, Meeting
from fxpipe.runtime.distributed.exchange import Exchange
from fxpipe.runtime.distributed.layout import Layouts
from fxpipe.runtime.distributed.part import estimate_of, wires_of
from fxpipe.runtime.distributed.plan import RankPlan
from fxpipe.runtime.distributed.progress import EVALUATION
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.distributed.replicated import ReplicatedCall
from fxpipe.runtime.distributed.row import RankRow, refuse_within_row
from fxpipe.runtime.distributed.shared_weights import first_names, holders
from fxpipe.runtime.distributed.transport import Transport
from fxpipe.runtime.distributed.weights import RankWeights
from fxpipe.runtime.engine import Visit
from fxpipe.runtime.listeners import LISTENERS
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.pipeline import Pipeline
from fxpipe.runtime.portal import CALLER, Wire
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.room import check_room
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.step import Step
from fxpipe.runtime.stream import Device, place
from fxpipe.runtime.transforms import refuse_transforms
from fxpipe.runtime.weights.state import put
from fxpipe.schedule import Schedule


class RankEngine(Pipeline):
    """Of `DistributedPipeline`, which users call, what one process does otherwise."""

    def __init__(
        self,
        manifest: Manifest,
        schedule: Schedule,
        stages: Sequence[Stage],
        device: Device,
        buffers: Mapping[str, Tensor],
        ranks: Ranks,
        outputs: Literal["last", "all"],
        fully_shard: bool,
    ) -> None:
        """`stages` are all; those of other ranks have empty modules.

        With `fully_shard` parameters will be shared out over replicas, by `shard`.
        """
        rank, homes = ranks.rank, manifest.stage_to_device
        held = holders(manifest)
        first = first_names(manifest)
        elsewhere = frozenset(name for name in first if rank not in held[first[name]])
        own = [stage for stage in stages if homes[stage.index] == rank]
        super().__init__(manifest, schedule, own, [device], buffers, elsewhere=elsewhere)
        self._ranks = ranks
        self._homes = (*homes, homes[-1])
        self._everywhere = stages
        self._gives_all = outputs == "all"
        self._plan = RankPlan(manifest, stages, schedule, self._wires, ranks.dp > 1, fully_shard)
        self._wires = {mode: wires_of(w, self._homes, rank) for mode, w in self._wires.items()}
        self._estimate = estimate_of(manifest.estimate, rank)
        self._first_lane = rank
        self._weights = RankWeights(manifest, own, ranks, self._plan.order[rank], fully_shard)
        self._transport = Transport(ranks, place(device), self._plan.routes)
        self._entry = Entry(manifest, ranks)
        self._row = RankRow(ranks, self._weights)
        self._layouts: dict[object, Layouts] = {}
        self._may_differ = False  # what several ranks hold, since each loaded what it was given
        # Whether a forward leaves nothing behind, so that one may begin before all ranks agree.
        self._early = not any(stage.spec.random for stage in stages) and not any(
            stage.spec.mutated_buffers for stage in own
        )
        LISTENERS.add(self)

    def equalize(self) -> None:
        """Give what several ranks hold the values that the first of them has."""
        held = [*self.parameters(), *self.buffers()]
        self._weights.equalize(self._state.parameters(self), held)
        self._may_differ = False

    def shard(self) -> None:
        """Share parameters out over the replicas, which are equal: each holds its part alone."""
        for name, share in self._weights.shard(self.mesh["dp"]).items():
            put(self, name, share)
        self._state.bind(self)

    @property
    def mesh(self) -> DeviceMesh:
        """All processes as a mesh of dimensions "dp", the replicas, and "pp".

        All ranks ask for it together.
        """
        return self._ranks.mesh(self._transport.device.type)

    @property
    def is_last(self) -> bool:
        """Whether the last stage is here: loss_fn runs and outputs come here."""
        return self._homes[-1] == self._ranks.rank

    def __deepcopy__(self, _: object) -> NoReturn:
        raise InputError(
            "a pipeline over processes can't be copied: load the package a second time, and copy "
            "parameters() and buffers() into that one's"
        )

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise InputError(
            "a pipeline over processes can't be pickled: save its state_dict() or, by all ranks "
            "together, fxpipe.checkpoint.save"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._weights.refuse_other_dtypes(fn, [*self.parameters()])
        return super()._apply(fn, recurse)

    def _bind(self) -> None:
        super()._bind()
        if self._weights.shards is not None:
            self._weights.shards.renew()

    def _loaded(self) -> None:
        super()._loaded()
        self._may_differ = True

    def _part(self, held: Tensor, given: Tensor) -> Tensor:
        return share_of(held, given)

    def _refuse_inside(self) -> None:
        super()._refuse_inside()
        refuse_within_row()

    def _refuse_step(self) -> None:
        super()._refuse_step()
        self._weights.refuse_hooks(self)

    def _owned(self) -> dict[str, Tensor]:
        owners = {name: ranks[0] for name, ranks in holders(self._manifest).items()}
        held = super()._owned().items()
        return {name: tensor for name, tensor in held if owners[name] == self._ranks.rank}

    def _collected(self) -> AbstractContextManager[None]:
        """For `step`: when the block ends, gradients are summed over all ranks that share them."""
        return self._weights.collected(self._state.parameters(self))

    def _meet(
        self,
        what: str,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *kind: object,
        refuse: Callable[[], None],
    ) -> tuple[list[Tensor | None], Meeting]:
        refuse_transforms()
        readers, specs = self._wires[self.training].readers, self._manifest.inputs
        read = {k for k, spec in enumerate(specs) if readers.get(Wire(CALLER, spec.value))}
        early, loaded = self._early, self._may_differ
        return self._entry.meet(
            what, self, read, args, kwargs, *kind, early=early, refuse=refuse, loaded=loaded
        )

    def _enter(
        self, inputs: Sequence[Tensor | None], meeting: Meeting
    ) -> tuple[Sequence[int], Call]:
        if meeting.loaded:
            self.equalize()
        rows = meeting.given.rows
        call = self._new_call(len(rows))
        # All ranks draw for all, so that their generators go on alike; the first stage's count.
        seeds = meeting.seeds(self._ranks.replica) if call.draws else []
        pieces = microbatch.scatter(*microbatch.present(self._manifest, inputs), rows)
        for i in range(call.m):
            random = RandomStream(seeds[i]) if seeds else None
            call.enter(i, pieces[i], random)
        return rows, call

    def _new_call(self, m: int) -> Call:
        links, here = self._new_links(m), self._ranks.rank
        elsewhere = [j for j, home in enumerate(self._homes) if home != here]
        wires = self._wires[self.training]
        return Call(self._everywhere, wires, links, 1, m, elsewhere)

    def _run_row(self, step: Step, call: Call, meeting: Meeting, backward: bool) -> None:
        """Run this rank's row; then keep what was learnt of the messages."""
        rows = self._plan.rows(call.m, self.training, backward)
        known = self._layouts.get(meeting.kind)
        shape = partial(self._plan.shape, meeting.given)
        exchange = Exchange(self._ranks, self._transport, call, rows, known, shape)
        self._exchange(step, exchange, call, self._ranks.wait, meeting)
        self._layouts[meeting.kind] = exchange.learnt

    def _exchange(
        self,
        step: Step,
        exchange: Exchange,
        call: Call,
        meanwhile: Callable[[threading.Event], None],
        meeting: Meeting | None = None,
    ) -> None:
        """Run this rank's row on its lane, and `meanwhile` here: see `RankRow.run`."""
        if self._trace is not None and self._ranks.progress.work != EVALUATION:
            replica = self._ranks.replica if self._ranks.dp > 1 else None
            call.record(self._trace.part_recorder(self._ranks.step_name, replica))

        def launch(job: Callable[[], None], beside: Callable[[], None]) -> None:
            self._run([job], call, beside)

        self._row.run(launch, step, exchange, call, meanwhile, meeting)
        if self._weights.replicas is not None and self.training:
            self._weights.replicas.equalize(self._written())

    def _written(self) -> list[Tensor]:
        """Buffers that a forward changes: running statistics are the first replica's."""
        buffers = dict(self.named_buffers())
        names = [name for stage in self._stages for name in stage.spec.mutated_buffers]
        return [buffers[name] for name in dict.fromkeys(names) if name in buffers]

    def _check_room(self, rows: int) -> None:
        if rows > self._fits:
            planned = -(-self._manifest.batch // self._manifest.microbatches)
            room = [room_bytes(stream.place(self._devices[0]), self._ranks.on_this_host)]
            own = Schedule((self._schedule.rows[self._ranks.rank],))
            factor = self._weights.training_factor(self._manifest.optimizer.factor)
            check_room(own, self._everywhere, room, rows / planned, factor)
            self._fits = rows

    def tell(self, error: BaseException) -> None:
        """Let the other ranks hear that this one's closure failed before it came to a call."""
        self._ranks.fail(error)

    def _spliced(self) -> None:
        with self._ranks.telling():
            self.equalize()
        first, around = first_names(self._manifest), names_around(self._manifest)
        kinds = {spec.name: spec.kind for spec in self._manifest.state}
        state = chain(self.named_parameters(), self.named_buffers())
        equalize_around(
            [t for name, t in state if first[name] in around and kinds[name] != "constant"],
            self._ranks,
        )
        self._gives_all = True  # what stands around runs on every rank

    def _beside_replicas(
        self, rows: int, around: Sequence[Tensor] | None
    ) -> AbstractContextManager[float]:
        self._ranks.progress.begin("step of closures")
        if self._weights.replicas is None:
            return super()._beside_replicas(rows, around)
        # Of a part it holds what stands around too, which no stage sums.
        first, outside = first_names(self._manifest), names_around(self._manifest)
        held = {t for name, t in self.named_parameters() if first[name] not in outside}
        others = None if around is None else [t for t in dict.fromkeys(around) if t not in held]
        return rank_visits.beside_replicas(self, self._weights.replicas, rows, others)

    def _new_visits(self, first: Visit, m: int) -> ReplicatedCall:
        return rank_visits.begin(self, first, m)

    def _run_visits(self, call: Call, table: Schedule, conduct: Callable[[], None]) -> None:
        assert isinstance(call, ReplicatedCall)
        rank_visits.run(self, call, table, conduct)
