"""What an order of actions is sought for: stages on their devices, and what these may hold."""

from dataclasses import dataclass

from fxpipe.ir import Network
from fxpipe.passes.simulate import (
    Message,
    Simulation,
    StageCost,
    handed_bytes,
    resting_bytes,
    simulate,
)
from fxpipe.schedule import Action, Kind, Schedule


@dataclass(frozen=True, slots=True)
class OrderProblem:
    """Stages and what they cost; an order of their actions is all that is left open.

    `devices` says where each stage is, `capacity_bytes` has an entry for each device, and
    `recompute[j][i]` says whether stage j recomputes micro-batch i.
    """

    stages: tuple[StageCost, ...]
    messages: tuple[Message, ...]
    network: Network
    devices: tuple[int, ...]
    capacity_bytes: tuple[int, ...]
    recompute: tuple[tuple[bool, ...], ...]

    @property
    def n_microbatches(self) -> int:
        """Micro-batches in a step."""
        return len(self.recompute[0])

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

    def fixed_bytes(self, device: int) -> int:
        """What a device holds from a step's start to its end."""
        return resting_bytes(self.stages, self.devices, len(self.capacity_bytes))[device]

    def action_ms(self, action: Action) -> float:
        """How long an F, I or W takes."""
        cost = self.stages[action.stage]
        if action.kind is Kind.FORWARD:
            return cost.forward_ms
        if action.kind is Kind.WEIGHT:
            return cost.weight_gradient_ms
        again = self.recompute[action.stage][action.microbatch]
        again_ms = cost.again_ms + (cost.forward_ms if again else 0.0)
        return cost.backward_ms - cost.weight_gradient_ms + cost.halving_ms + again_ms

    def held_bytes(self, action: Action) -> int:
        """What an F or I adds to memory until its micro-batch's W has ended, besides messages."""
        cost, again = self.stages[action.stage], self.recompute[action.stage][action.microbatch]
        if action.kind is Kind.FORWARD:
            handed = handed_bytes(self.messages, self.devices)[action.stage]
            return cost.input_bytes + (cost.written_bytes if again else cost.saved_bytes) + handed
        return (cost.saved_bytes if again else cost.again_bytes) + cost.arriving_bytes

    def transfer_ms(self, source: int, target: int, n_bytes: int) -> float:
        """How long a message from stage to stage takes; nothing on one device."""
        pair = self.devices[source], self.devices[target]
        return self.network.between(*pair).transfer_ms(n_bytes) if pair[0] != pair[1] else 0.0

    def least_step_ms(self) -> float:
        """A bound that needs no search: all that a device does, and all that comes before it."""
        sent = {(one.source, one.target): one.bytes for one in self.messages}
        before_ms = [0.0]
        for j, cost in enumerate(self.stages[:-1]):
            before_ms.append(before_ms[-1] + cost.forward_ms)
            if (j, j + 1) in sent:
                before_ms[-1] += self.transfer_ms(j, j + 1, sent[j, j + 1])
        least = 0.0
        for device in set(self.devices):
            held = [j for j, place in enumerate(self.devices) if place == device]
            work_ms = sum(
                self.action_ms(Action(j, kind, i))
                for j in held
                for i in range(self.n_microbatches)
                for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
            )
            least = max(least, before_ms[held[0]] + work_ms)
        return least
