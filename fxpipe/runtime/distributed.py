"""A pipeline over processes: each rank holds its device's stages and runs its row of the table.

The engine is that of one process: the same `Step` runs each action. What goes to a stage of another
rank lands in the call's outbox and is sent once the action is done.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from fxpipe.errors import FxpipeError, InputError, WeightsError
from fxpipe.runtime import microbatch, rank_visits, stream
from fxpipe.runtime.around import equalize_around, names_around
from fxpipe.runtime.call import Call
from fxpipe.runtime.closure import running
from fxpipe.runtime.dtensors import is_cut, local, share_of
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.exchange import Exchange, Layouts
from fxpipe.runtime.listeners import LISTENERS
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.overflow import share_overflow
from fxpipe.runtime.pipeline import Pipeline, Visit
from fxpipe.runtime.portal import CALLER, Wire
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.rank_entry import Entry, Meeting, place_of
from fxpipe.runtime.rank_part import estimate_of, wires_of
from fxpipe.runtime.rank_plan import RankPlan
from fxpipe.runtime.rank_results import give_gradients, shared_loss
from fxpipe.runtime.rank_row import RankRow
from fxpipe.runtime.ranks import Ranks
from fxpipe.runtime.replicas import Replicas
from fxpipe.runtime.replicated import ReplicatedCall
from fxpipe.runtime.room import check_room
from fxpipe.runtime.saving import save
from fxpipe.runtime.shards import Shards
from fxpipe.runtime.shared_weights import SharedWeights, first_names, holders
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.state import put
from fxpipe.runtime.step import Step
from fxpipe.runtime.stream import Device, place
from fxpipe.runtime.structure import rebuild
from fxpipe.runtime.transport import Transport
from fxpipe.schedule import Schedule


class DistributedPipeline(Pipeline):
    """This rank's part of a compiled model; all ranks call its methods together.

    `state_dict`, `parameters` and so on have what this rank's stages use, under the original names.
    Each rank is given the inputs that its stages read, or all: others may be None or left out.
    """

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
        values = {name: value for name, value in buffers.items() if name not in elsewhere}
        super().__init__(manifest, schedule, own, [device], values, elsewhere=elsewhere)
        self._ranks = ranks
        self._homes = (*homes, homes[-1])
        self._everywhere = stages
        self._gives_all = outputs == "all"
        self._plan = RankPlan(manifest, stages, schedule, self._wires, ranks.dp > 1, fully_shard)
        self._wires = {mode: wires_of(w, self._homes, rank) for mode, w in self._wires.items()}
        self._estimate = estimate_of(manifest.estimate, rank)
        self._shared = SharedWeights(manifest, own, ranks, fully_shard)
        self._replicas: Replicas | None = None
        if ranks.dp > 1:
            shared = [each.name for each in self._shared.shared]
            self._replicas = Replicas(ranks, own, self._plan.order[rank], first, shared)
        self._shards: Shards | None = None
        self._transport = Transport(ranks, place(device), self._plan.routes)
        self._entry = Entry(manifest, ranks)
        self._row = RankRow(ranks, self._replicas)
        self._layouts: dict[object, Layouts] = {}
        LISTENERS.add(self)

    def equalize(self) -> None:
        """Give what several ranks hold the values that the first of them has."""
        if self._replicas is not None:
            self._replicas.equalize([*self.parameters(), *self.buffers()])
        self._shared.equalize(self._state.parameters(self))

    def shard(self) -> None:
        """Share parameters out over the replicas, which are equal: each holds its part alone."""
        names, mesh = first_names(self._manifest), self.mesh["dp"]
        self._shards = self._row.shards = Shards(self._ranks, self._stages, names, mesh)
        for name, share in self._shards.parameters.items():
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

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The original model's output for a batch, without gradients.

        It comes on the last stage's rank, None on others; loaded with `outputs="all"`, on all. In a
        closure of a `Runner` all ranks give its inputs and get its output, with gradients too.
        Raises InputError, StageError.
        """
        if running() is not None:
            return super().forward(*args, **kwargs)
        if torch.is_grad_enabled():
            raise InputError(
                "over several processes a call makes no graph: train with step() or a Runner, or "
                "call the pipeline under torch.no_grad()"
            )
        microbatch.refuse_unmergeable(self._manifest, self.training)
        self._ranks.progress.begin("evaluation")
        inputs, meeting = self._meet("an input", args, kwargs)
        with self._ranks.telling():
            rows, call = self._enter(inputs, meeting)
            self._run_row(Step(call, lambda i: None, frozenset()), call, meeting, backward=False)
            leaves = self._merged(call, inputs, rows) if self.is_last else None
            if self._gives_all:
                gathered = self._transport.gather(self._ranks.gather, leaves or [])
                leaves = gathered[self._homes[-1]]
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
        get, are those of the mean over all replicas' rows. Raises InputError, alike on all ranks,
        if they weren't called with the same; StageError that names the rank if one fails.
        """
        if not torch.is_grad_enabled():
            raise InputError("step computes gradients: call it outside of torch.no_grad()")
        scaled = scaler is not None and scaler.is_enabled()
        self._ranks.progress.begin("step")
        inputs, meeting = self._meet("a step", args, kwargs, place_of(loss_fn), scaled)
        with self._ranks.telling():
            rows, call = self._enter(inputs, meeting)
            step, objective = self._new_step(call, rows, meeting.batch, target, loss_fn, scaler)
            with self._collected():
                self._run_row(step, call, meeting, backward=True)
            if any(meeting.given.gradients):
                found = self._input_gradients(step, inputs, rows)
                give_gradients(inputs, found, self._ranks, self._transport)
            if scaler is not None and scaled:
                share_overflow(scaler, [*self.parameters()], self._ranks)
            loss = objective.loss() if self.is_last else None
            return shared_loss(loss, self._ranks, self._transport.device)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, around: Iterable[Tensor] = ()
    ) -> Tensor:
        """Scale all ranks' gradients down so that their norm over all is at most `max_norm`.

        Returns the norm that they had. What several ranks hold counts once, and so does `around`,
        which all have with equal gradients.
        """
        owned = holders(self._manifest)
        first = first_names(self._manifest)
        gradients = [
            local(parameter.grad)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
            and owned[first[name]][0] == self._ranks.rank
            and (self._ranks.replica == 0 or is_cut(parameter))
        ]
        held = set(self.parameters())
        others = [tensor for tensor in dict.fromkeys(around) if tensor not in held]
        if self._ranks.world_rank == 0:
            gradients += [tensor.grad for tensor in others if tensor.grad is not None]
        self._ranks.progress.begin("clip_grad_norm_")
        with self._ranks.telling():
            own = float(nn.utils.get_total_norm([g for g in gradients if g.numel()], norm_type))
            norms = torch.tensor(self._ranks.gather_world(own), dtype=torch.float64)
        total: Tensor = torch.linalg.vector_norm(norms, norm_type)
        nn.utils.clip_grads_with_norm_([*self.parameters(), *others], max_norm, total)
        return total

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

    def __repr__(self) -> str:
        return f"rank {self._ranks.rank} of {self._ranks.size}: {super().__repr__()}"

    def __deepcopy__(self, _: object) -> NoReturn:
        raise InputError("a pipeline over processes can't be copied: load the package again")

    def _owned(self) -> dict[str, Tensor]:
        owners = {name: ranks[0] for name, ranks in holders(self._manifest).items()}
        held = super()._owned().items()
        return {name: tensor for name, tensor in held if owners[name] == self._ranks.rank}

    @contextmanager
    def _collected(self) -> Iterator[None]:
        """For `step`: when the block ends, gradients are summed over all ranks that share them."""
        parameters = self._state.parameters(self)
        with ExitStack() as stack:
            if self._shards is not None:
                total = partial(self._shared.sum_shares, parameters)
                stack.enter_context(self._shards.collected(parameters, total))
            else:
                if self._replicas is not None:
                    stack.enter_context(self._replicas.collected(parameters))
                stack.enter_context(self._shared.collected(parameters))
            yield

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self._shards is not None and self._shards.gathered:
            for dtype in {parameter.dtype for parameter in self.parameters()}:
                if fn(torch.empty(0, dtype=dtype)).dtype != dtype:
                    raise InputError(
                        "a sharded pipeline's dtype can't change after the first call: change it "
                        "right after load(), or load again"
                    )
        return super()._apply(fn, recurse)

    def _bind(self) -> None:
        super()._bind()
        if self._shards is not None:
            self._shards.renew()

    def _part(self, held: Tensor, given: Tensor) -> Tensor:
        return share_of(held, given)

    def _meet(
        self, what: str, args: Sequence[object], kwargs: Mapping[str, object], *kind: object
    ) -> tuple[list[Tensor | None], Meeting]:
        readers, specs = self._wires[self.training].readers, self._manifest.inputs
        read = {k for k, spec in enumerate(specs) if readers.get(Wire(CALLER, spec.value))}
        return self._entry.meet(what, self, read, args, kwargs, *kind)

    def _enter(
        self, inputs: Sequence[Tensor | None], meeting: Meeting
    ) -> tuple[Sequence[int], Call]:
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

    def tell(self, error: BaseException) -> None:
        """Let the other ranks hear that this one's closure failed before it came to a call."""
        self._ranks.fail(error)

    def _spliced(self) -> None:
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
        if self._replicas is None:
            return super()._beside_replicas(rows, around)
        held = set(self.parameters())
        others = None if around is None else [t for t in dict.fromkeys(around) if t not in held]
        return rank_visits.beside_replicas(self._ranks, self._replicas, rows, others)

    def _new_visits(self, first: Visit, m: int) -> ReplicatedCall:
        return rank_visits.begin(self, first, m)

    def _run_visits(self, call: Call, table: Schedule, conduct: Callable[[], None]) -> None:
        assert isinstance(call, ReplicatedCall)
        rank_visits.run(self, call, table, conduct)

    def _run_row(self, step: Step, call: Call, meeting: Meeting, backward: bool) -> None:
        """Run this rank's row; then keep what was learnt of the messages."""
        rows = self._plan.rows(call.m, self.training, backward)
        known = self._layouts.get(meeting.kind)
        shape = partial(self._plan.shape, meeting.given)
        exchange = Exchange(self._ranks, self._transport, call, rows, known, shape)
        self._exchange(step, exchange, call, self._ranks.wait)
        if known is None:
            self._layouts[meeting.kind] = exchange.learnt

    def _exchange(
        self,
        step: Step,
        exchange: Exchange,
        call: Call,
        meanwhile: Callable[[threading.Event], None],
    ) -> None:
        """Run this rank's row on its lane, and `meanwhile` here: see `RankRow.run`."""
        if self._trace is not None:
            call.record(self._trace.recorder())

        def launch(job: Callable[[], None], beside: Callable[[], None]) -> None:
            self._run([job], call, beside)

        self._row.run(launch, step, exchange, call, meanwhile)
        if self._replicas is not None and self.training:
            self._replicas.equalize(self._written())

    def _written(self) -> list[Tensor]:
        """Buffers that a forward changes: running statistics are the first replica's."""
        buffers = dict(self.named_buffers())
        names = [name for stage in self._stages for name in stage.spec.mutated_buffers]
        return [buffers[name] for name in dict.fromkeys(names) if name in buffers]

    def _check_room(self, rows: int) -> None:
        if rows > self._fits:
            planned = -(-self._manifest.batch // self._manifest.microbatches)
            places = [stream.place(self._devices[0])] * self._ranks.on_this_host
            room = stream.capacities(places)[:1]
            own = Schedule((self._schedule.rows[self._ranks.rank],))
            factor = self._manifest.optimizer.factor
            if self._shards is not None:
                # What was gathered, its gradients, and shares of all.
                factor = 1 + (1 + factor) / self._ranks.dp
            check_room(own, self._everywhere, room, rows / planned, factor)
            self._fits = rows
