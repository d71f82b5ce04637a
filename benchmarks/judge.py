"""A bare chain under the simulator: the step and the memory of cuts and a table, in quick turns."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from fxpipe.jit import compiled
from fxpipe.passes import simulate_kernel
from fxpipe.passes.simulate import KINDS
from fxpipe.schedule import Schedule

Cuts = tuple[int, ...]
Rank = tuple[int, float]
TIMES = ("forward_ms", "input_gradient_ms", "weight_gradient_ms")
BYTES = ("parameter_bytes", "saved_bytes")


class Judge:
    """Costs of the chain in the content of a file, summed up so that any cuts are known at once."""

    def __init__(self, content: dict[str, Any]) -> None:
        blocks = content["blocks"]
        self.n_blocks = len(blocks)
        self.capacity_bytes = int(content["capacity_bytes"])
        self._held = 1 + content.get("optimizer_bytes_per_parameter_byte", 0)
        self._link = content["latency_ms"], 1e6 * content["bandwidth_gb_s"]
        self._times, self._bytes = (
            np.array([[0, *accumulate(block[key] for block in blocks)] for key in keys])
            for keys in (TIMES, BYTES)
        )
        self._output = np.array([block["output_bytes"] for block in blocks])
        skips = [(skip["from"], skip["to"], skip["bytes"]) for skip in content.get("skips", ())]
        self._skips = np.array(skips, np.int64).reshape(-1, 3)

    def times(self) -> list[float]:
        """Forward and backward of all blocks before each."""
        return self._times.sum(0).tolist()

    def bytes(self) -> list[int]:
        """Parameters and what is saved of one micro-batch, of all blocks before each."""
        return self._bytes.sum(0).tolist()

    def on(self, schedule: Schedule) -> Callable[[Cuts], Rank]:
        """What to sort cuts by under `schedule`: bytes over the capacity, then the step in ms."""
        flat = [action for row in schedule.rows for action in row]
        ends = np.cumsum([len(row) for row in schedule.rows])
        kinds = np.array([KINDS.index(action.kind) for action in flat], np.int8)
        stage_of = np.array([action.stage for action in flat], np.int32)
        microbatch_of = np.array([action.microbatch for action in flat], np.int32)
        none = np.empty((0, 0, 0)), np.empty(0, np.bool_), np.empty(0, np.int64), 0.0
        shape = schedule.n_stages, schedule.n_microbatches
        device_of = np.array(schedule.stage_to_device)
        zeros, nowhere = np.zeros((shape[0], 2), np.int64), np.zeros(shape, np.bool_)

        def rank(cuts: Cuts) -> Rank:
            lasts, keeps, at_rest, outbox_ends, receivers, sizes, transfers = _costs(
                np.array((0, *cuts, self.n_blocks)), self._times, self._bytes, self._output,
                self._skips, device_of, len(schedule.rows), self._held, *self._link,
            )  # fmt: skip
            ran = simulate_kernel.run(
                ends, kinds, stage_of, microbatch_of, *none, device_of, lasts, keeps, zeros,
                zeros[:, 0], nowhere, outbox_ends, receivers, sizes, transfers, at_rest, False,
            )  # fmt: skip
            return int(np.maximum(ran[7] - self.capacity_bytes, 0).sum()), float(ran[5].max())

        return rank


@compiled
def _costs(bounds, times, held, output, skips, device_of, n_devices, factor, latency_ms, per_ms):  # type: ignore[no-untyped-def]
    """What `simulate_kernel.run` takes of the stages between `bounds` and of their messages."""
    n = len(bounds) - 1
    lasts, keeps = np.zeros((4, n, 2)), np.zeros((n, 2), np.int64)
    at_rest = np.zeros(n_devices, np.int64)
    sent = np.full((n, n), -1)
    for j in range(n):
        took = times[:, bounds[j + 1]] - times[:, bounds[j]]
        lasts[0, j], lasts[1, j] = took[0], took[1] + took[2]
        lasts[2, j], lasts[3, j] = took[1], took[2]
        kept = held[:, bounds[j + 1]] - held[:, bounds[j]]
        at_rest[device_of[j]] += np.int64(np.ceil(factor * kept[0]))
        keeps[j, 0] = kept[1]
        if j < n - 1:
            sent[j, j + 1] = output[bounds[j + 1] - 1]
    for k in range(len(skips)):
        source = np.searchsorted(bounds, skips[k, 0], side="right") - 1
        target = np.searchsorted(bounds, skips[k, 1], side="right") - 1
        if source != target:
            sent[source, target] = max(sent[source, target], 0) + skips[k, 2]
    outbox_ends = np.zeros(2 * n, np.int64)
    receivers, sizes = np.zeros(n * n, np.int64), np.zeros(n * n, np.int64)
    count = 0
    for j in range(n):
        # After F to later stages, after the backward to earlier ones, nearest first.
        for way in range(2):
            for far in range(1, n - j if way == 0 else j + 1):
                other = j + far if way == 0 else j - far
                size = sent[j, other] if way == 0 else sent[other, j]
                if size >= 0 and device_of[j] != device_of[other]:
                    receivers[count], sizes[count] = other, size
                    count += 1
            outbox_ends[2 * j + way] = count
    sizes = sizes[:count]
    transfers = latency_ms + sizes / per_ms
    return lasts, keeps, at_rest, outbox_ends, receivers[:count], sizes, transfers


def equal(sums: Sequence[float], n_stages: int) -> Cuts:
    """Cuts where `sums` grows by nearly as much in each stage, a block in each at least."""
    inner = np.asarray(sums)
    cuts: list[int] = []
    for j in range(1, n_stages):
        cut = int(np.abs(inner - inner[-1] * j / n_stages).argmin())
        least = cuts[-1] + 1 if cuts else 1
        cuts.append(min(max(cut, least), len(sums) - 1 - (n_stages - j)))
    return tuple(cuts)
