"""A schedule table, stages and messages as arrays, for the simulator's kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir import Network
from fxpipe.passes.simulate_costs import Message, StageCost, handed_bytes, resting_bytes
from fxpipe.schedule import Kind, Schedule

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]

KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True)
class Numbers:
    """Stages, messages, links and recomputation as `simulate_kernel.run` takes them."""

    device_of: _Ints
    lasts: _Floats
    keeps: _Ints
    comes_back: _Ints
    workspace: _Ints
    recompute: NDArray[np.bool_]
    outbox_ends: _Ints
    receivers: _Ints
    sizes: _Ints
    transfers: _Floats
    at_rest: _Ints
    arriving: _Ints

    def __iter__(self) -> Any:
        return (getattr(self, name) for name in self.__slots__)


def rows_of(schedule: Schedule) -> tuple[_Ints, NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The table as the kernel takes it: where rows end, kinds, stages, micro-batches."""
    flat = [action for row in schedule.rows for action in row]
    return (
        np.cumsum([len(row) for row in schedule.rows]),
        np.fromiter((_NUMBERS[action.kind] for action in flat), np.int8, len(flat)),
        np.fromiter((action.stage for action in flat), np.int32, len(flat)),
        np.fromiter((action.microbatch for action in flat), np.int32, len(flat)),
    )


def numbers(
    stages: Sequence[StageCost],
    messages: Sequence[Message],
    network: Network,
    device_of: Sequence[int],
    recompute: Sequence[Sequence[bool]],
    n_devices: int,
) -> Numbers:
    """What the kernel takes, of stage j on device `device_of[j]`."""
    n = len(stages)
    # Outbox 2 j is stage j's after F, 2 j + 1 its outbox after the backward, nearest first.
    outboxes: list[list[tuple[int, int, float]]] = [[] for _ in range(2 * n)]
    sending_ms = np.zeros((n, 2))  # of each F and of each backward, both ends' part
    for message in sorted(messages, key=lambda one: one.target - one.source):
        ends = message.source, message.target
        source, target = (device_of[j] for j in ends)
        if source == target:
            continue
        there, back = network.between(source, target), network.between(target, source)
        outboxes[2 * ends[0]].append((ends[1], message.bytes, there.transfer_ms(message.bytes)))
        sending_ms[ends, 0] += there.busy_ms(message.values, message.bytes)
        size = message.gradient_bytes
        if size is not None:
            outboxes[2 * ends[1] + 1].append((ends[0], size, back.transfer_ms(size)))
            sending_ms[ends, 1] += back.busy_ms(message.gradients, size)
    slots = [slot for outbox in outboxes for slot in outbox]
    times = [_times(cost, *ms) for cost, ms in zip(stages, sending_ms.tolist(), strict=True)]
    return Numbers(
        device_of=np.array(device_of, np.int64),
        lasts=np.array(times, np.float64).reshape(n, 4, 2).transpose(1, 0, 2).copy(),
        keeps=np.array(
            [
                (
                    c.saved_bytes + c.input_bytes - c.passing_bytes,
                    c.written_bytes + c.input_bytes - c.returned_bytes,
                )
                for c in stages
            ],
            np.int64,
        )
        + np.array(handed_bytes(messages, device_of), np.int64)[:, None],
        comes_back=np.array([(c.again_bytes, c.saved_bytes) for c in stages], np.int64),
        workspace=np.array(
            [[(c.workspace_of(k, False), c.workspace_of(k, True)) for c in stages] for k in KINDS],
            np.int64,
        ),
        recompute=np.array(recompute, np.bool_),
        outbox_ends=np.cumsum([len(outbox) for outbox in outboxes]),
        receivers=np.array([stage for stage, _, _ in slots], np.int64),
        sizes=np.array([size for _, size, _ in slots], np.int64),
        transfers=np.array([ms for _, _, ms in slots], np.float64),
        at_rest=np.array(resting_bytes(stages, device_of, n_devices), np.int64),
        arriving=np.array([cost.arriving_bytes for cost in stages], np.int64),
    )


def _times(cost: StageCost, there_ms: float, back_ms: float) -> list[tuple[float, float]]:
    """By kind: how long it takes, and how long if the micro-batch is recomputed.

    F sends and receives for `there_ms`, B or I for `back_ms`.
    """
    forward, backward = cost.forward_ms, cost.backward_ms + cost.again_ms + back_ms
    weight = cost.weight_gradient_ms
    first = backward - weight + cost.halving_ms
    return [
        (forward + there_ms, forward + there_ms),
        (backward, backward + forward),
        (first, first + forward),
        (weight, weight),
    ]
