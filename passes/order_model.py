"""The CP-SAT model of a step whose order is open.

In whole units of time, each cost rounded down:

1. Each F, I and W, and each B of a backward that is to be whole, is an interval on its stage's
   device, and a device runs one at a time.
2. Each message that takes time is an interval on its ordered pair of devices, one at a time.
3. F starts when the stages before have sent, I or B when those after have, W after its own I.
4. A device's memory: saved bytes from the start of F (of I or B, if recomputed) to the end of W or
   B, received ones from the start of the transfer, or of the action that sends them to a stage with
   a workspace, and that while an action runs.
5. A stage's forwards go by number of the micro-batch, as what they write into buffers has to.
   Micro-batches that are recomputed alike, and whose backwards are, are alike, so all their actions
   go by number.
6. The end of the last interval is minimised.

A message may wait here for room at its receiver, or for another that was sent later, which it does
not in the simulator: hence a relaxation of it.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise, product
from typing import TYPE_CHECKING

from fxpipe.passes.order_problem import OrderProblem
from fxpipe.schedule import Action, Kind, Schedule

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


class OrderModel:
    """The model, in `unit_ms`, of `spare` bytes less on each device than it has."""

    def __init__(
        self, problem: OrderProblem, spare: tuple[int, ...], unit_ms: float, horizon: int
    ) -> None:
        from ortools.sat.python import cp_model

        self.problem = problem
        self.spare = spare
        self.unit_ms = unit_ms
        self.horizon = horizon
        self.model = cp_model.CpModel()
        self.starts: dict[Action, cp_model.IntVar] = {}
        self.ends: dict[Action, cp_model.LinearExpr] = {}
        self.links: dict[tuple[int, int], list[cp_model.IntervalVar]] = defaultdict(list)
        # By device, what is held: since when, until when, bytes.
        self.held: list[list[tuple[cp_model.LinearExprT, cp_model.LinearExprT, int]]] = [
            [] for _ in problem.capacity_bytes
        ]
        self.received = [0] * len(problem.stages)  # with each F
        self.makespan = self.model.new_int_var(0, horizon, "makespan")
        self._add_actions()
        self._add_messages()
        self._add_memory()
        self._add_numbering()
        self.model.minimize(self.makespan)

    def _interval(
        self, name: str, duration: int, resource: "list[cp_model.IntervalVar]"
    ) -> "cp_model.IntVar":
        start = self.model.new_int_var(0, self.horizon - duration, name)
        resource.append(self.model.new_fixed_size_interval_var(start, duration, f"{name}_"))
        return start

    def _units(self, ms: float) -> int:
        return int(ms / self.unit_ms * (1 + 1e-12))

    def _each(self) -> Iterator[tuple[Action, ...]]:
        """The actions of each stage and micro-batch: F, then B, or I and W."""
        for j in range(len(self.problem.stages)):
            for i in range(self.problem.n_microbatches):
                yield self.problem.actions(j, i)

    def _backward(self, stage: int, i: int) -> Action:
        """The action that sends gradients on."""
        return self.problem.actions(stage, i)[1]

    def _done(self, stage: int, i: int) -> "cp_model.LinearExpr":
        """When nothing of the micro-batch is held any more."""
        return self.ends[self.problem.actions(stage, i)[-1]]

    def _add_actions(self) -> None:
        """Rules 1 and 6, and of rule 3 what is within a stage."""
        running: dict[int, list[cp_model.IntervalVar]] = defaultdict(list)
        for actions in self._each():
            for action in actions:
                duration = self._units(self.problem.action_ms(action))
                device = self.problem.devices[action.stage]
                self.starts[action] = self._interval(str(action), duration, running[device])
                self.ends[action] = self.starts[action] + duration
            for before, after in pairwise(actions):
                self.model.add(self.starts[after] >= self.ends[before])
            self.model.add(self.makespan >= self.ends[actions[-1]])
        for intervals in running.values():
            self.model.add_no_overlap(intervals)

    def _add_messages(self) -> None:
        """Rule 2, and of rule 3 what is between stages."""
        for j in range(1, len(self.problem.stages)):
            self._add_waits(j - 1, j, None)
            self._add_waits(j, j - 1, None)
        for message in self.problem.messages:
            source, target = message.source, message.target
            self._add_waits(source, target, message.bytes)
            if message.gradient_bytes is not None:
                self._add_waits(target, source, message.gradient_bytes)
        for intervals in self.links.values():
            self.model.add_no_overlap(intervals)

    def _add_waits(self, source: int, target: int, n_bytes: int | None) -> None:
        """`target` waits with each micro-batch for `source`, and for what that sends if it does."""
        devices, forward = self.problem.devices, source < target
        pair = devices[source], devices[target]
        trip_ms = 0.0 if n_bytes is None else self.problem.transfer_ms(source, target, n_bytes)
        duration = self._units(trip_ms)
        sends = n_bytes is not None and pair[0] != pair[1]
        if forward and sends:
            self.received[target] += n_bytes or 0
        for i in range(self.problem.n_microbatches):
            sender, waiting = (
                Action(j, Kind.FORWARD, i) if forward else self._backward(j, i)
                for j in (source, target)
            )
            since: cp_model.LinearExprT = self.ends[sender]
            if duration:
                start = self._interval(f"{sender}_to_{target}", duration, self.links[pair])
                self.model.add(start >= since)
                since = start
            self.model.add(self.starts[waiting] >= since + duration)
            if sends:
                if self.problem.stages[target].backward_workspace_bytes:
                    since = self.starts[sender]
                # What came for F, and is not gone then, is counted on with what F saves.
                until = self.ends[waiting] if forward else self._done(target, i)
                self._hold(target, since, until, n_bytes or 0)

    def _hold(
        self,
        stage: int,
        since: "cp_model.LinearExprT",
        until: "cp_model.LinearExprT",
        n_bytes: int,
    ) -> None:
        if n_bytes > 0:
            self.held[self.problem.devices[stage]].append((since, until, n_bytes))

    def _add_memory(self) -> None:
        """Rule 4, on each device that could be too small."""
        problem = self.problem
        for forward, backward, *weight in self._each():
            j, done = forward.stage, self._done(forward.stage, forward.microbatch)
            kept = problem.held_bytes(forward)
            begun, ended = self.starts[forward], self.ends[forward]
            self._hold(j, begun, ended, problem.workspace_bytes(forward) + kept)
            self._hold(j, ended, done, kept + self.received[j])
            self._hold(j, self.starts[backward], done, problem.held_bytes(backward))
            for action in (backward, *weight):
                span = self.starts[action], self.ends[action]
                self._hold(j, *span, problem.workspace_bytes(action))
        for device, held in enumerate(self.held):
            room = problem.capacity_bytes[device] - self.spare[device]
            room -= int(problem.numbers.at_rest[device])
            if sum(n_bytes for _, _, n_bytes in held) <= room:
                continue
            spans = []
            for k, (start, end, _) in enumerate(held):
                size = self.model.new_int_var(0, self.horizon, f"held_{device}_{k}_for")
                spans.append(self.model.new_interval_var(start, size, end, f"held_{device}_{k}"))
            self.model.add_cumulative(spans, [n_bytes for _, _, n_bytes in held], max(0, room))
            self._add_in_flight(device, room)

    def _add_in_flight(self, device: int, room: int) -> None:
        """What rule 4 says of one stage alone: so many micro-batches at most, one in, one out."""
        problem = self.problem
        for j in range(len(problem.stages)):
            each = problem.held_bytes(Action(j, Kind.FORWARD, 0)) + self.received[j]
            mixed = any(problem.recompute[j]) or any(stage == j for stage, _ in problem.whole)
            if problem.devices[j] != device or each <= 0 or mixed:
                continue
            most = max(0, room) // each
            for i in range(problem.n_microbatches - most):
                newest = Action(j, Kind.FORWARD, i + most)
                self.model.add(self.starts[newest] >= self._done(j, i))

    def _add_numbering(self) -> None:
        """Rule 5."""
        for j, i in product(range(len(self.problem.stages)), range(1, self.problem.n_microbatches)):
            first, second = (Action(j, Kind.FORWARD, k) for k in (i - 1, i))
            self.model.add(self.starts[second] >= self.ends[first])
        alike: dict[tuple[bool, ...], list[int]] = defaultdict(list)
        stages = range(len(self.problem.stages))
        for i, column in enumerate(zip(*self.problem.recompute, strict=True)):
            alike[(*column, *((j, i) in self.problem.whole for j in stages))].append(i)
        for numbers in alike.values():
            for j in stages:
                for i, k in pairwise(numbers):
                    both = zip(self.problem.actions(j, i), self.problem.actions(j, k), strict=True)
                    for first, second in both:
                        self.model.add(self.starts[second] >= self.ends[first])

    def go_greedily(self) -> None:
        """Search first where what can start earliest does; at one time I or B, then F, then W."""
        from ortools.sat.python import cp_model

        first = {Kind.INPUT: 0, Kind.BACKWARD: 0, Kind.FORWARD: 1, Kind.WEIGHT: 2}

        def place(action: Action) -> tuple[int, int, int]:
            return first[action.kind], action.microbatch, action.stage

        starts = [self.starts[action] for action in sorted(self.starts, key=place)]
        earliest = cp_model.CHOOSE_LOWEST_MIN, cp_model.SELECT_MIN_VALUE
        self.model.add_decision_strategy(starts, *earliest)

    def hint(self, schedule: Schedule) -> None:
        """Start the search from this order's times, micro-batches by number."""
        spans = self.problem.simulate(schedule).spans
        for row, times in zip(schedule.rows, spans, strict=True):
            for action, (start_ms, end_ms) in zip(row, times, strict=True):
                j, i = action.stage, action.microbatch
                if action.kind is Kind.BACKWARD and action not in self.starts:
                    weight = Action(j, Kind.WEIGHT, i)
                    weight_ms = end_ms - self.problem.action_ms(weight)
                    self.model.add_hint(self.starts[weight], self._units(weight_ms))
                    action = Action(j, Kind.INPUT, i)
                self.model.add_hint(self.starts[action], self._units(start_ms))

    def order(self, solver: "cp_model.CpSolver") -> Schedule:
        """The order of a solution's starts; what takes no time goes first, in the order it must."""

        def place(action: Action) -> tuple[int, int, int, int]:
            start, end = solver.value(self.starts[action]), solver.value(self.ends[action])
            kind = _KINDS.index(action.kind)
            return start, end, kind, -action.stage if kind else action.stage

        return Schedule(
            tuple(
                tuple(
                    sorted(
                        (a for a in self.starts if self.problem.devices[a.stage] == device),
                        key=place,
                    )
                )
                for device in range(len(self.held))
            )
        )
