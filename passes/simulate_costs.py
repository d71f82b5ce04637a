"""What the simulator takes: a stage's costs, the messages that it sends, and what devices hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from fxpipe.schedule import Kind


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage on one micro-batch. `input_bytes` are those of the model's inputs it reads.

    `weight_gradient_ms` is what of `backward_ms` is for weights alone. The stage's segments, if it
    has any, compute `again_bytes` of what they save again, in `again_ms`, in every backward. If its
    backward is halved, the first half takes `halving_ms` longer than its part of the whole, and
    `arriving_bytes`, gradients most of all, less what only the first needs, wait for the second;
    each part has a workspace of its own. `passing_bytes` of what it reads are gone after F, or, if
    it recomputes, after that, save the `returned_bytes` that only the caller reads; it keeps copies
    then of the buffers that F writes, `written_bytes`. `shared` names what of its static bytes
    other stages have too, such as a tied weight: a device holds it once.
    `loss_bytes` are there as F ends and the loss is taken, in the place of F's workspace.
    """

    forward_ms: float
    backward_ms: float
    static_bytes: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    weight_gradient_ms: float = 0.0
    again_ms: float = 0.0
    again_bytes: int = 0
    arriving_bytes: int = 0
    passing_bytes: int = 0
    returned_bytes: int = 0
    halving_ms: float = 0.0
    written_bytes: int = 0
    input_workspace_bytes: int = 0
    weight_workspace_bytes: int = 0
    shared: tuple[tuple[str, int], ...] = ()
    loss_bytes: int = 0

    def workspace_of(self, kind: Kind, again: bool) -> int:
        """What an action of this kind needs while it runs, on a micro-batch recomputed or not."""
        forward = self.forward_workspace_bytes
        passing = self.returned_bytes if again else self.passing_bytes
        if kind is Kind.FORWARD:
            return max(forward, self.loss_bytes) + passing
        if kind is Kind.WEIGHT:
            return self.weight_workspace_bytes
        whole = kind is Kind.BACKWARD
        own = self.backward_workspace_bytes if whole else self.input_workspace_bytes
        return max(own - (self.passing_bytes - passing), forward) if again else own


@dataclass(frozen=True, slots=True)
class Message:
    """What stage `source` sends to stage `target` after F, and what gradients come back, if any.

    It is so many `values` and `gradients`. If both are on one device, `source` holds `handed_bytes`
    more until its backward has ended.
    """

    source: int
    target: int
    bytes: int
    gradient_bytes: int | None
    handed_bytes: int = 0
    values: int = 1
    gradients: int = 1


def resting_bytes(
    stages: Sequence[StageCost], device_of: Sequence[int], n_devices: int
) -> list[int]:
    """What each device holds between steps."""
    held = [0] * n_devices
    shared: list[dict[str, int]] = [{} for _ in held]
    for cost, device in zip(stages, device_of, strict=True):
        held[device] += cost.static_bytes - sum(size for _, size in cost.shared)
        shared[device].update(cost.shared)
    return [own + sum(sizes.values()) for own, sizes in zip(held, shared, strict=True)]


def handed_bytes(messages: Sequence[Message], device_of: Sequence[int]) -> list[int]:
    """What each stage holds of what it hands to others on its device."""
    held = [0] * len(device_of)
    for message in messages:
        if device_of[message.source] == device_of[message.target]:
            held[message.source] += message.handed_bytes
    return held
