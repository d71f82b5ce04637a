"""A step as a job shop, on arrays alone: rows of actions, and the chains that hold them apart.

An action starts when the one before it on its device and all that it waits for are done, so a step
is as long as its longest chain of actions. Memory, and messages that wait for each other, are the
simulator's to tell.

Actions are numbered (kind * n_stages + stage) * n_microbatches + micro-batch; kinds are F 0,
backward 1, W 2. A *node* is a kind of a stage, of any micro-batch. The W of a whole backward is
there as well, and takes no time. An *order* has a number for each action: the lower, the sooner.
"""

import numpy as np

from fxpipe.jit import compiled
from fxpipe.passes.simulate_event_kernel import BACKWARD, FORWARD, INPUT, WEIGHT


@compiled
def wired(numbers):  # type: ignore[no-untyped-def]
    """What each node waits for, and what for it: nodes, -1 for none, and the ms of messages."""
    outbox_ends, receivers, transfers = numbers[6], numbers[7], numbers[9]
    n = len(numbers[0])
    lag = np.full((2, n, n), -1.0)  # by way, of the message from one stage to another
    for j in range(n - 1):
        lag[0, j, j + 1], lag[1, j + 1, j] = 0.0, 0.0
    for box in range(2 * n):
        for slot in range(outbox_ends[box - 1] if box > 0 else 0, outbox_ends[box]):
            lag[box % 2, box // 2, receivers[slot]] = transfers[slot]
    n_before, n_after = np.zeros(3 * n, np.int64), np.zeros(3 * n, np.int64)
    before, after = np.full((3 * n, n + 1), -1), np.full((3 * n, n + 1), -1)
    before_ms, after_ms = np.zeros((3 * n, n + 1)), np.zeros((3 * n, n + 1))
    for way in range(3):
        for source in range(n):
            for target in range(n):
                if way < 2 and lag[way, source, target] >= 0:
                    a, b, ms = way * n + source, way * n + target, lag[way, source, target]
                elif way < 2 and source == target:  # the backward after F, W after the backward
                    a, b, ms = way * n + source, (way + 1) * n + source, 0.0
                else:
                    continue
                before[b, n_before[b]], before_ms[b, n_before[b]] = a, ms
                after[a, n_after[a]], after_ms[a, n_after[a]] = b, ms
                n_before[b] += 1
                n_after[a] += 1
    most = max(n_before.max(), n_after.max())
    return before[:, :most], before_ms[:, :most], after[:, :most], after_ms[:, :most]


@compiled
def lasting(numbers, split):  # type: ignore[no-untyped-def]
    """How long each action takes."""
    lasts, recompute = numbers[1], numbers[5]
    n, m = recompute.shape
    ms = np.zeros(3 * n * m)
    for j in range(n):
        for i in range(m):
            again = 1 if recompute[j, i] else 0
            ms[j * m + i] = lasts[FORWARD, j, again]
            ms[(n + j) * m + i] = lasts[INPUT if split[j, i] else BACKWARD, j, again]
            if split[j, i]:
                ms[(2 * n + j) * m + i] = lasts[WEIGHT, j, again]
    return ms


@compiled
def holding(numbers, split):  # type: ignore[no-untyped-def]
    """Bytes that each action adds to its device's, needs besides while it runs, and gives back.

    As the simulator has it, but that what is received counts from the action that it is for.
    """
    keeps, comes_back, workspace, recompute = numbers[2:6]
    outbox_ends, receivers, sizes, arriving = numbers[6], numbers[7], numbers[8], numbers[11]
    n, m = recompute.shape
    received = np.zeros((2, n), np.int64)
    for box in range(2 * n):
        for slot in range(outbox_ends[box - 1] if box > 0 else 0, outbox_ends[box]):
            received[box % 2, receivers[slot]] += sizes[slot]
    adds, needs = np.zeros(3 * n * m, np.int64), np.zeros(3 * n * m, np.int64)
    frees = np.zeros(3 * n * m, np.int64)
    for j in range(n):
        for i in range(m):
            again = 1 if recompute[j, i] else 0
            first, second, third = j * m + i, (n + j) * m + i, (2 * n + j) * m + i
            adds[first] = keeps[j, again] + received[0, j]
            adds[second] = comes_back[j, again] + received[1, j]
            needs[first] = workspace[FORWARD, j, again]
            last = third if split[j, i] else second
            if split[j, i]:
                adds[second] += arriving[j]
                needs[second] = workspace[INPUT, j, again]
                needs[third] = workspace[WEIGHT, j, again]
            else:
                needs[second] = workspace[BACKWARD, j, again]
            frees[last] = adds[first] + adds[second]
    return adds, needs, frees


@compiled
def short_devices(numbers, holds, capacity):  # type: ignore[no-untyped-def]
    """Which devices have not room for all that their actions hold, if none gave any of it back."""
    adds, needs, _ = holds
    device_of, most = numbers[0], numbers[10].copy()
    n, m = numbers[5].shape
    for action in range(len(adds)):
        most[device_of[action // m % n]] += adds[action] + needs[action]
    return most > capacity


@compiled
def order_of(ran, n_stages, n_microbatches):  # type: ignore[no-untyped-def]
    """Of each action of a step that ran, how many began before it; W of a whole right after B."""
    order = np.zeros((3, n_stages, n_microbatches))
    kinds, stages, microbatches = ran[1], ran[2], ran[3]
    for k in range(len(kinds)):
        j, i = stages[k], microbatches[k]
        if kinds[k] == BACKWARD:
            order[1, j, i], order[2, j, i] = k, k + 0.5
        else:
            order[0 if kinds[k] == FORWARD else 1 if kinds[k] == INPUT else 2, j, i] = k
    return order


@compiled
def rows_by(order, device_of, n_devices):  # type: ignore[no-untyped-def]
    """The actions of each device in this order, then -1, and the place of each."""
    _, n, m = order.shape
    counts = np.zeros(n_devices, np.int64)
    for j in range(n):
        counts[device_of[j]] += 3 * m
    rows, place = np.full((n_devices, counts.max() + 1), -1), np.empty(3 * n * m, np.int64)
    counts[:] = 0
    for action in np.argsort(order.ravel(), kind="mergesort"):
        d = device_of[action // m % n]
        rows[d, counts[d]], place[action] = action, counts[d]
        counts[d] += 1
    return rows, place


@compiled
def table_by(order, split, device_of, n_devices):  # type: ignore[no-untyped-def]
    """The actions in this order as the simulator follows them, halves put together but for `split`.

    Where the rows end, kinds, stages and micro-batches.
    """
    _, n, m = order.shape
    rows, _ = rows_by(order, device_of, n_devices)
    count = 2 * n * m + split.sum()
    ends, kinds = np.empty(n_devices, np.int64), np.empty(count, np.int8)
    stages, microbatches = np.empty(count, np.int32), np.empty(count, np.int32)
    count = 0
    for d in range(n_devices):
        for action in rows[d]:
            if action < 0:
                break
            way, j, i = action // (n * m), action // m % n, action % m
            if way == 2 and not split[j, i]:
                continue
            stages[count], microbatches[count] = j, i
            kinds[count] = FORWARD if way == 0 else WEIGHT if way == 2 else BACKWARD
            if way == 1 and split[j, i]:
                kinds[count] = INPUT
            count += 1
        ends[d] = count
    return ends, kinds, stages, microbatches


@compiled
def chained(rows, place, device_of, m, ms, wires, heads, tails, sorted_, waits):  # type: ignore[no-untyped-def]
    """The step's ms in this order: of each action the least before its start and after its end.

    They go to `heads` and `tails`, the actions in an order in which they can run to `sorted_`.
    """
    before, before_ms, after, after_ms = wires
    n, most = len(device_of), before.shape[1]
    count, done, step_ms = 0, 0, 0.0
    for action in range(len(ms)):
        node = action // m
        waits[action] = 1 if place[action] > 0 else 0
        for k in range(most):
            if before[node, k] < 0:
                break
            waits[action] += 1
        if waits[action] == 0:
            sorted_[count] = action
            count += 1
    while done < count:
        action = sorted_[done]
        done += 1
        node, i = action // m, action % m
        row, at = rows[device_of[node % n]], place[action]
        head = heads[row[at - 1]] + ms[row[at - 1]] if at > 0 else 0.0
        for k in range(most):
            if before[node, k] < 0:
                break
            other = before[node, k] * m + i
            head = max(head, heads[other] + ms[other] + before_ms[node, k])
        heads[action] = head
        step_ms = max(step_ms, head + ms[action])
        for k in range(-1, most):
            other = row[at + 1] if k < 0 else after[node, k] * m + i
            if k >= 0 and after[node, k] < 0:
                break
            if other >= 0:
                waits[other] -= 1
                if waits[other] == 0:
                    sorted_[count] = other
                    count += 1
    for done in range(count - 1, -1, -1):
        action = sorted_[done]
        node, i = action // m, action % m
        other = rows[device_of[node % n], place[action] + 1]
        tail = tails[other] + ms[other] if other >= 0 else 0.0
        for k in range(most):
            if after[node, k] < 0:
                break
            other = after[node, k] * m + i
            tail = max(tail, tails[other] + ms[other] + after_ms[node, k])
        tails[action] = tail
    return step_ms
