"""From cuts to the numbers that `simulate_kernel.run` takes, on arrays alone."""

import numpy as np

from fxpipe.jit import compiled
from fxpipe.passes.partition_blocks import FRAGMENTATION
from fxpipe.passes.search.again_kernel import stage_memory
from fxpipe.passes.simulate_event_kernel import BACKWARD, FORWARD, INPUT, WEIGHT


@compiled
def static_bytes(begin, end, ends, befores, sizes):  # type: ignore[no-untyped-def]
    """What the blocks [begin, end) hold between steps; storages that several name count once."""
    total = 0
    for k in range(ends[begin - 1] if begin > 0 else 0, ends[end - 1]):
        if befores[k] < begin:
            total += sizes[k]
    return total


@compiled
def adding_bytes(begin, end, ends, befores, afters, sizes):  # type: ignore[no-untyped-def]
    """The gradients that add up in a backward, as partition_blocks has it."""
    total, largest = 0, 0
    for k in range(ends[begin - 1] if begin > 0 else 0, ends[end - 1]):
        if befores[k] < begin and afters[k] < end:
            total += sizes[k]
            largest = max(largest, sizes[k])
    return total + largest


@compiled
def shared_bytes(begin, end, ends, befores, sizes, bounds, device_of, j):  # type: ignore[no-untyped-def]
    """What of that the stage of its blocks before that names it, on the same device, has too."""
    total = 0
    for k in range(ends[begin - 1] if begin > 0 else 0, ends[end - 1]):
        if 0 <= befores[k] < begin:
            last = np.searchsorted(bounds, befores[k], side="right") - 1
            if device_of[last] == device_of[j]:
                total += sizes[k]
    return total


@compiled
def cut(  # type: ignore[no-untyped-def]
    bounds, n_microbatches, device_of, prices, whole,
    action_ms, forward_before, backward_before, weight_before, halving_before,
    loss_bytes, forward_workspaces, backward_workspaces, input_workspaces, weight_workspaces,
    arriving_before, written_before, crossing,
    n_names, saved_ends, saved_befores, saved_sizes, saved_names,
    static_ends, static_befores, static_sizes,
    trained_ends, trained_befores, trained_sizes, trained_afters,
    producers, value_sizes, value_names, gradients, read_ends, readers,
    latency, per_ms, value_ms, byte_ms,
):  # fmt: skip
    """The numbers of stages with these bounds, stage j on device `device_of[j]`.

    `prices[j]` is what a kept byte costs stage j in ms, 0 where it computes nothing again; `whole`
    is the share of the backwards that are not in halves.
    """
    n, n_devices = len(bounds) - 1, len(latency)
    lasts = np.empty((4, n, 2))
    keeps, comes_back = np.zeros((n, 2), np.int64), np.zeros((n, 2), np.int64)
    workspace = np.zeros((4, n, 2), np.int64)
    at_rest = np.zeros(n_devices, np.int64)
    arriving = np.zeros(n, np.int64)
    sends_back, received = np.zeros(n, np.bool_), np.zeros(n, np.int64)
    there, back = np.full((n, n), -1, np.int64), np.full((n, n), -1, np.int64)
    values_there, values_back = np.zeros((n, n), np.int64), np.zeros((n, n), np.int64)
    inputs = np.zeros(n, np.int64)
    again = np.zeros(bounds[n], np.int8)
    present, come = np.full(n_names, -1), np.full(n_names, -1)
    for value in range(len(producers)):
        source = -1
        if producers[value] >= 0:
            source = np.searchsorted(bounds, producers[value], side="right") - 1
        last = source
        if gradients[value] and source >= 0 and readers[read_ends[value] - 1] == bounds[n]:
            inputs[n - 1] += value_sizes[value]  # the caller's gradient of the output
        for r in range(read_ends[value - 1] if value > 0 else 0, read_ends[value]):
            # The caller takes the model's outputs from the last stage.
            target = min(np.searchsorted(bounds, readers[r], side="right") - 1, n - 1)
            if target <= last:
                continue
            last = target
            sends_back[target] = sends_back[target] or gradients[value]
            if source < 0:
                inputs[target] += value_sizes[value]
                continue
            received[target] += value_sizes[value]
            there[source, target] = max(there[source, target], 0) + value_sizes[value]
            values_there[source, target] += 1
            if gradients[value]:
                # Of what the last stage reads as well, the caller's comes by itself.
                both = readers[r] < bounds[n] == readers[read_ends[value] - 1]
                n_times = 2 if both and target == n - 1 else 1
                back[source, target] = max(back[source, target], 0) + n_times * value_sizes[value]
                values_back[source, target] += n_times
    for j in range(n):
        begin, end = bounds[j], bounds[j + 1]
        forward = action_ms + forward_before[end] - forward_before[begin]
        backward = action_ms + backward_before[end] - backward_before[begin]
        weight, halving = backward, action_ms
        if sends_back[j]:
            weight = action_ms + weight_before[end] - weight_before[begin]
            halving = action_ms + halving_before[end] - halving_before[begin]
        # Of what a device keeps there are as many micro-batches on their way, in all of its stages,
        # and no more; of segments there is one at a time, if the backward is whole.
        on_their_way = n - j if n <= n_devices else n + n_devices
        on_their_way = min(on_their_way, n_microbatches * n / n_devices)
        kept, comes, largest, again_ms = stage_memory(
            begin, end, prices[j], whole / on_their_way, forward_before, crossing,
            saved_ends, saved_befores, saved_sizes, saved_names,
            producers, value_sizes, value_names, read_ends, readers, again, present, come,
        )  # fmt: skip
        if again[begin:end].any():
            kept += written_before[end] - written_before[begin]
        static = static_bytes(begin, end, static_ends, static_befores, static_sizes)
        at_rest[device_of[j]] += static - shared_bytes(
            begin, end, static_ends, static_befores, static_sizes, bounds, device_of, j
        )
        for k in range(2):
            lasts[FORWARD, j, k] = forward
            lasts[BACKWARD, j, k] = backward + again_ms
            lasts[INPUT, j, k] = backward + again_ms - weight + halving
            lasts[WEIGHT, j, k] = weight
            keeps[j, k] = inputs[j] + kept
            comes_back[j, k] = largest
        # Between its halves a backward holds all that was computed again.
        arriving[j] = comes - largest
        if sends_back[j]:
            arriving[j] += arriving_before[end] - arriving_before[begin]
        needed, of_both, of_inputs, of_weights = 0, 0, 0, 0
        for k in range(begin, end):
            needed = max(needed, forward_workspaces[k])
            of_both = max(of_both, backward_workspaces[k])
            of_inputs = max(of_inputs, input_workspaces[k])
            of_weights = max(of_weights, weight_workspaces[k])
        if max(needed, of_both) > 0:
            of_both += adding_bytes(
                begin, end, trained_ends, trained_befores, trained_afters, trained_sizes
            )
            if not sends_back[j]:
                of_inputs, of_weights = of_both, of_both
            # As partition_blocks has it, but for what it knows not to be there at the same time.
            share = int(np.ceil(FRAGMENTATION * (static + kept + comes)))
            if again[begin:end].any():
                of_both, of_inputs = max(of_both, needed), max(of_inputs, needed)
            if j == n - 1:
                needed = max(needed, loss_bytes)
            workspace[FORWARD, j] = needed + received[j] + share
            workspace[BACKWARD, j] = of_both + share
            workspace[INPUT, j] = of_inputs + share
            workspace[WEIGHT, j] = of_weights + share
    outbox_ends = np.zeros(2 * n, np.int64)
    receivers = np.empty(n * n, np.int64)
    sizes, transfers = np.empty(n * n, np.int64), np.empty(n * n)
    n_slots = 0
    for box in range(2 * n):
        j = box // 2
        for step in range(1, n):  # nearest first
            other = j + step if box % 2 == 0 else j - step
            if other < 0 or other >= n:
                continue
            size = there[j, other] if box % 2 == 0 else back[other, j]
            if device_of[other] == device_of[j]:
                # The value waits there, then its gradient (simulate.handed_bytes).
                if box % 2 == 0 and size > 0 and workspace[BACKWARD, j, 0] > 0:
                    keeps[j] += size
            elif size >= 0:
                d, e = device_of[j], device_of[other]
                receivers[n_slots], sizes[n_slots] = other, size
                transfers[n_slots] = latency[d, e] + size / per_ms[d, e]
                n_slots += 1
                n_values = values_there[j, other] if box % 2 == 0 else values_back[other, j]
                busy = n_values * value_ms[d, e] + size * byte_ms[d, e]
                for end in (j, other):
                    if box % 2 == 0:
                        lasts[FORWARD, end] += busy
                    else:
                        lasts[BACKWARD, end] += busy
                        lasts[INPUT, end] += busy
        outbox_ends[box] = n_slots
    recompute = np.zeros((n, n_microbatches), np.bool_)
    numbers = (
        device_of, lasts, keeps, comes_back, workspace, recompute, outbox_ends,
        receivers[:n_slots], sizes[:n_slots], transfers[:n_slots], at_rest, arriving,
    )  # fmt: skip
    return numbers, again
