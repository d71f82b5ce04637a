"""Cuts, devices, schedule and recomputation, and what is predicted of them."""

from dataclasses import dataclass
from enum import StrEnum

from fxpipe.schedule import Action, Schedule


class CheckpointMode(StrEnum):
    """Which micro-batches a stage recomputes in backward (torchgpipe, section 2.1)."""

    NEVER = "never"
    EXCEPT_LAST = "except_last"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """What the plan predicts of one stage; times and saved bytes are of one micro-batch."""

    forward_ms: float
    backward_ms: float
    parameter_bytes: int
    saved_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """What action `sent` sends to the device of action `ended` waits until that has ended."""

    sent: Action
    ended: Action


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator predicts of one training step.

    `spans` has the shape of the schedule's rows: when each action begins and ends, in ms. `memory`
    is what each device holds over time: (ms, bytes) at first and after each change. `critical` are
    the actions that the step's length hangs on, in order of time. Of `peak_bytes`, `ahead_bytes`
    are set aside for messages that a process asks for ahead. Where GPUs wait for what a host
    launches, `captured_ms` is the step without that, as of one captured as a CUDA graph, and
    `together_bytes` is what devices that share a memory, all of them, hold of it at most. No device
    holds more than its peak while `waits` are kept.
    """

    step_ms: float
    bubble: float
    peak_bytes: tuple[int, ...]
    spans: tuple[tuple[tuple[float, float], ...], ...]
    stages: tuple[StageEstimate, ...]
    memory: tuple[tuple[tuple[float, int], ...], ...] = ()
    critical: tuple[Action, ...] = ()
    ahead_bytes: tuple[int, ...] = ()
    captured_ms: float | None = None
    together_bytes: int | None = None
    waits: tuple[Wait, ...] = ()


# The schedule's name where the table is the user's own.
GIVEN = "given"


@dataclass(frozen=True, slots=True)
class Plan:
    """Cuts, schedule and recomputation together, with what they are predicted to cost.

    `cuts[j]` is the number of blocks before stage j+1; stage j runs on `stage_to_device[j]`, and
    recomputes the blocks [begin, end) of each of its `segments`, each segment in one piece, in
    the backward of every micro-batch.
    `bound_ms` is a proven lower bound on the step time of any plan with this schedule, where the
    solver gives one.
    """

    cuts: tuple[int, ...]
    stage_to_device: tuple[int, ...]
    schedule_name: str
    schedule: Schedule
    checkpoint: tuple[CheckpointMode, ...]
    estimate: Estimate
    solver: str
    bound_ms: float | None = None
    segments: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def gap(self) -> float | None:
        """How far the predicted step lies above the bound, as a share of the step."""
        if self.bound_ms is None or self.estimate.step_ms == 0:
            return None
        return max(0.0, 1 - self.bound_ms / self.estimate.step_ms)
