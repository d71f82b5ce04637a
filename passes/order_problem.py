"""What an order of actions is sought for: stages on their devices, and what these may hold."""

from dataclasses import dataclass
from functools import cached_property

from fxpipe.ir import Network
from fxpipe.passes.simulate import Simulation, simulate
from fxpipe.passes.simulate_costs import Message, StageCost
from fxpipe.passes.simulate_numbers import KINDS, Numbers, numbers
from fxpipe.schedule import Action, Kind, Schedule

_HALVES = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
_WHOLE = (Kind.FORWARD, Kind.BACKWARD)


@dataclass(frozen=True)
class OrderProblem:
    """Stages and what they cost; an order of their actions is all that is left open.

    `devices` says where each stage is, `capacity_bytes` has an entry for each device, and
    `recompute[j][i]` says whether stage j recomputes micro-batch i. Of the stages and micro-batches
    in `whole` the backward is one action, of all others two.
    """

    stages: tuple[StageCost, ...]
    messages: tuple[Message, ...]
    network: Network
    devices: tuple[int, ...]
    capacity_bytes: tuple[int, ...]
    recompute: tuple[tuple[bool, ...], ...]
    whole: frozenset[tuple[int, int]] = frozenset()

    @property
    def n_microbatches(self) -> int:
        """Micro-batches in a step."""
        return len(self.recompute[0])

    @cached_property
    def numbers(self) -> Numbers:
        """Times and bytes, as the simulator takes them."""
        n_devices = len(self.capacity_bytes)
        return numbers(
            self.stages, self.messages, self.network, self.devices, self.recompute, n_devices
        )

    def actions(self, stage: int, microbatch: int) -> tuple[Action, ...]:
        """F and B, or F, I and W."""
        kinds = _WHOLE if (stage, microbatch) in self.whole else _HALVES
        return tuple(Action(stage, kind, microbatch) for kind in kinds)

    def simulate(self, schedule: Schedule) -> Simulation:
        """A step in the order of `schedule`."""
        return simulate(
            schedule, self.stages, self.messages, self.network, self.recompute, record=False
        )

    def over(self, schedule: Schedule) -> tuple[int, ...]:
        """By device, the bytes that its peak lies over its capacity."""
        peaks = zip(self.simulate(schedule).peak_bytes, self.capacity_bytes, strict=True)
        return tuple(max(0, peak - capacity) for peak, capacity in peaks)

    def rank(self, schedule: Schedule) -> tuple[int, float]:
        """What to sort orders by, best first: bytes over the capacity, then the step."""
        found = self.simulate(schedule)
        peaks = zip(found.peak_bytes, self.capacity_bytes, strict=True)
        return sum(max(0, peak - capacity) for peak, capacity in peaks), found.step_ms

    def action_ms(self, action: Action) -> float:
        """How long an action takes."""
        return float(self.numbers.lasts[self._place(action)])

    def workspace_bytes(self, action: Action) -> int:
        """What is there while an action runs alone."""
        return int(self.numbers.workspace[self._place(action)])

    def _place(self, action: Action) -> tuple[int, int, int]:
        again = int(self.recompute[action.stage][action.microbatch])
        return KINDS.index(action.kind), action.stage, again

    def held_bytes(self, action: Action) -> int:
        """What an F, a B or an I adds to memory until its micro-batch is done, besides messages.

        Negative where some of what was received is gone after F.
        """
        j, again = action.stage, int(self.recompute[action.stage][action.microbatch])
        if action.kind is Kind.FORWARD:
            return int(self.numbers.keeps[j, again])
        halved = action.kind is Kind.INPUT
        return int(self.numbers.comes_back[j, again] + halved * self.numbers.arriving[j])

    def transfer_ms(self, source: int, target: int, n_bytes: int) -> float:
        """How long a message from stage to stage takes; nothing on one device."""
        pair = self.devices[source], self.devices[target]
        return self.network.between(*pair).transfer_ms(n_bytes) if pair[0] != pair[1] else 0.0

    def least_step_ms(self) -> float:
        """A bound that needs no search: all that a device does, and all that comes before it."""
        sent = {(one.source, one.target): one.bytes for one in self.messages}
        before_ms = [0.0]
        for j in range(len(self.stages) - 1):
            before_ms.append(before_ms[-1] + self.action_ms(Action(j, Kind.FORWARD, 0)))
            if (j, j + 1) in sent:
                before_ms[-1] += self.transfer_ms(j, j + 1, sent[j, j + 1])
        least = 0.0
        for device in set(self.devices):
            held = [j for j, place in enumerate(self.devices) if place == device]
            work_ms = sum(
                self.action_ms(action)
                for j in held
                for i in range(self.n_microbatches)
                for action in self.actions(j, i)
            )
            least = max(least, before_ms[held[0]] + work_ms)
        return least
