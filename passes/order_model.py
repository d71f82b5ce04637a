"""The CP-SAT model of a step whose order is open.

In whole units of time, each cost rounded down:

1. Each F, I and W is an interval on its stage's device, and a device runs one at a time. A whole
   backward is an I and its W, one after the other: that is never longer.
2. Each message that takes time is an interval on its ordered pair of devices, one at a time.
3. F starts when the stages before have sent, I when those after have, W after its own I.
4. A device's memory: saved bytes from the start of F (of I, if recomputed) to the end of W,
   received ones from the start of the transfer, or of the action that sends them to a stage with a
   workspace, and that while an action runs.
5. Micro-batches that are recomputed alike are alike, so their F, I and W go by number.
6. The end of the last interval is minimised.

A message may wait here for room at its receiver, or for another that was sent later, which it does
not in the simulator: hence a relaxation of it.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from fxpipe.passes.order_problem import OrderProblem
from fxpipe.schedule import Action, Kind, Schedule

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

PARTS = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)


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

    def _actions(self, *kinds: Kind) -> Iterator[Action]:
        for j in range(len(self.problem.stages)):
            for i in range(self.problem.n_microbatches):
                yield from (Action(j, kind, i) for kind in kinds)

    def _add_actions(self) -> None:
        """Rules 1 and 6, and of rule 3 what is within a stage."""
        running: dict[int, list[cp_model.IntervalVar]] = defaultdict(list)
        for action in self._actions(*PARTS):
            duration = self._units(self.problem.action_ms(action))
            device = self.problem.devices[action.stage]
            self.starts[action] = self._interval(str(action), duration, running[device])
            self.ends[action] = self.starts[action] + duration
        for intervals in running.values():
            self.model.add_no_overlap(intervals)
        for j in range(len(self.problem.stages)):
            for i in range(self.problem.n_microbatches):
                f, b, w = (Action(j, kind, i) for kind in PARTS)
                self.model.add(self.starts[b] >= self.ends[f])
                self.model.add(self.starts[w] >= self.ends[b])
                self.model.add(self.makespan >= self.ends[w])

    def _add_messages(self) -> None:
        """Rule 2, and of rule 3 what is between stages."""
        for j in range(1, len(self.problem.stages)):
            self._add_waits(Kind.FORWARD, j - 1, j, None)
            self._add_waits(Kind.INPUT, j, j - 1, None)
        for message in self.problem.messages:
            source, target = message.source, message.target
            self._add_waits(Kind.FORWARD, source, target, message.bytes)
            if message.gradient_bytes is not None:
                self._add_waits(Kind.INPUT, target, source, message.gradient_bytes)
        for intervals in self.links.values():
            self.model.add_no_overlap(intervals)

    def _add_waits(self, kind: Kind, source: int, target: int, n_bytes: int | None) -> None:
        """`target` waits with each micro-batch for `source`, and for what that sends if it does."""
        devices = self.problem.devices
        pair = devices[source], devices[target]
        trip_ms = 0.0 if n_bytes is None else self.problem.transfer_ms(source, target, n_bytes)
        duration = self._units(trip_ms)
        for i in range(self.problem.n_microbatches):
            since: cp_model.LinearExprT = self.ends[Action(source, kind, i)]
            if duration:
                name = f"{source}{kind}{i}_to_{target}"
                start = self._interval(name, duration, self.links[pair])
                self.model.add(start >= since)
                since = start
            self.model.add(self.starts[Action(target, kind, i)] >= since + duration)
            if n_bytes is not None and pair[0] != pair[1]:
                if self.problem.stages[target].backward_workspace_bytes:
                    since = self.starts[Action(source, kind, i)]
                self._hold(target, i, since, n_bytes)

    def _hold(self, stage: int, i: int, since: "cp_model.LinearExprT", n_bytes: int) -> None:
        until = self.ends[Action(stage, Kind.WEIGHT, i)]
        self.held[self.problem.devices[stage]].append((since, until, n_bytes))

    def _add_memory(self) -> None:
        """Rule 4, on each device that could be too small."""
        problem = self.problem
        for action in self._actions(Kind.FORWARD, Kind.INPUT):
            since, n_bytes = self.starts[action], problem.held_bytes(action)
            self._hold(action.stage, action.microbatch, since, n_bytes)
        for action in self._actions(*PARTS):
            again = problem.recompute[action.stage][action.microbatch]
            needed = problem.stages[action.stage].workspace_of(action.kind, again)
            one = (self.starts[action], self.ends[action], needed)
            self.held[problem.devices[action.stage]].append(one)
        for device, held in enumerate(self.held):
            room = problem.capacity_bytes[device] - problem.fixed_bytes(device) - self.spare[device]
            held = [one for one in held if one[2]]
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
            each = problem.held_bytes(Action(j, Kind.FORWARD, 0))
            if problem.devices[j] != device or not each or any(problem.recompute[j]):
                continue
            most = max(0, room) // each
            for i in range(problem.n_microbatches - most):
                oldest = Action(j, Kind.WEIGHT, i)
                newest = Action(j, Kind.FORWARD, i + most)
                self.model.add(self.starts[newest] >= self.ends[oldest])

    def _add_numbering(self) -> None:
        """Rule 5."""
        alike: dict[tuple[bool, ...], list[int]] = defaultdict(list)
        for i, column in enumerate(zip(*self.problem.recompute, strict=True)):
            alike[column].append(i)
        for numbers in alike.values():
            for j in range(len(self.problem.stages)):
                for kind in PARTS:
                    for i, k in pairwise(numbers):
                        first, second = Action(j, kind, i), Action(j, kind, k)
                        self.model.add(self.starts[second] >= self.ends[first])

    def go_greedily(self) -> None:
        """Search first where what can start earliest does; at one time I, then F, then W."""
        from ortools.sat.python import cp_model

        def place(action: Action) -> tuple[int, int, int]:
            kind = (Kind.INPUT, Kind.FORWARD, Kind.WEIGHT).index(action.kind)
            return kind, action.microbatch, action.stage

        starts = [self.starts[action] for action in sorted(self.starts, key=place)]
        earliest = cp_model.CHOOSE_LOWEST_MIN, cp_model.SELECT_MIN_VALUE
        self.model.add_decision_strategy(starts, *earliest)

    def hint(self, schedule: Schedule) -> None:
        """Start the search from this order's times, micro-batches by number."""
        spans = self.problem.simulate(schedule).spans
        for row, times in zip(schedule.rows, spans, strict=True):
            for action, (start_ms, end_ms) in zip(row, times, strict=True):
                j, i = action.stage, action.microbatch
                if action.kind is Kind.BACKWARD:
                    weight = Action(j, Kind.WEIGHT, i)
                    weight_ms = end_ms - self.problem.action_ms(weight)
                    self.model.add_hint(self.starts[weight], self._units(weight_ms))
                    action = Action(j, Kind.INPUT, i)
                self.model.add_hint(self.starts[action], self._units(start_ms))

    def order(self, solver: "cp_model.CpSolver") -> Schedule:
        """The order of a solution's starts; what takes no time goes first, in the order it must."""

        def place(action: Action) -> tuple[int, int, int, int]:
            start, end = solver.value(self.starts[action]), solver.value(self.ends[action])
            kind = PARTS.index(action.kind)
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
