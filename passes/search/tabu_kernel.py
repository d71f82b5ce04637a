"""The order of actions by tabu search, on arrays alone.

To shorten a step, an action has to go to the other end of a run of actions that a longest chain
holds on one device (Nowicki and Smutnicki, Management Science 42, 1996; moves as in Balas and
Vazacopoulos, Management Science 44, 1998). Forwards of one stage keep their order: what they write
into buffers goes by number of the micro-batch.
"""

import numpy as np

from fxpipe.jit import compiled
from fxpipe.passes.search.shop_kernel import (
    chained,
    holding,
    lasting,
    rows_by,
    short_devices,
    wired,
)

_REACH = 12  # places that an action goes at most
_TENURE = 15  # tries, to twice as many, until an action may go back


@compiled
def critical(rows, place, device_of, m, ms, wires, heads, tails, step_ms, path):  # type: ignore[no-untyped-def]
    """A longest chain of actions, drawn where there are several; its length. It goes to `path`."""
    _, _, after, after_ms = wires
    n, slack = len(device_of), 1e-9 * step_ms
    action, seen = -1, 0
    for other in range(len(ms)):
        if heads[other] <= 0 and ms[other] + tails[other] >= step_ms - slack:
            seen += 1
            if np.random.randint(seen) == 0:
                action = other
    length = 0
    while action >= 0:
        path[length] = action
        length += 1
        node, i, end = action // m, action % m, heads[action] + ms[action]
        found, seen = -1, 0
        for k in range(-1, after.shape[1]):
            if k < 0:
                other, lag = rows[device_of[node % n], place[action] + 1], 0.0
            elif after[node, k] < 0:
                break
            else:
                other, lag = after[node, k] * m + i, after_ms[node, k]
            if other < 0 or heads[other] > end + lag + slack:
                continue
            if heads[other] + ms[other] + tails[other] >= step_ms - slack:
                seen += 1
                if np.random.randint(seen) == 0:
                    found = other
        action = found
    return length


@compiled
def reordered_ms(run, row, first, m, ms, wires, heads, tails, starts):  # type: ignore[no-untyped-def]
    """About the longest chain through `run`, if its actions stand in `row` from `first` on so."""
    before, before_ms, after, after_ms = wires
    last = first + len(run) - 1
    end = heads[row[first - 1]] + ms[row[first - 1]] if first > 0 else 0.0
    for k in range(len(run)):
        node, i = run[k] // m, run[k] % m
        for edge in range(before.shape[1]):
            if before[node, edge] < 0:
                break
            other = before[node, edge] * m + i
            end = max(end, heads[other] + ms[other] + before_ms[node, edge])
        starts[k] = end
        end += ms[run[k]]
    longest = 0.0
    tail = tails[row[last + 1]] + ms[row[last + 1]] if row[last + 1] >= 0 else 0.0
    for k in range(len(run) - 1, -1, -1):
        node, i = run[k] // m, run[k] % m
        for edge in range(after.shape[1]):
            if after[node, edge] < 0:
                break
            other = after[node, edge] * m + i
            tail = max(tail, tails[other] + ms[other] + after_ms[node, edge])
        tail += ms[run[k]]
        longest = max(longest, starts[k] + tail)
    return longest


@compiled
def passes_forward(action, others, n, m):  # type: ignore[no-untyped-def]
    """Whether `action` is a forward and one of the same stage is among the others."""
    node = action // m
    if node < n:
        for other in others:
            if other != action and other // m == node:
                return True
    return False


@compiled
def can_pass(action, other, forth, m, ms, wires, heads, tails):  # type: ignore[no-untyped-def]
    """Whether `action` may run right after `other`, where that is `forth`, or right before it.

    It may not if a chain leads from what waits for it to `other`, or back.
    """
    edges = wires[2] if forth else wires[0]
    node, i = action // m, action % m
    for k in range(edges.shape[1]):
        if edges[node, k] < 0:
            break
        near = edges[node, k] * m + i
        a, b = (near, other) if forth else (other, near)
        if a == b or (heads[b] >= heads[a] + ms[a] and tails[a] >= tails[b] + ms[b]):
            return False
    return True


@compiled
def turned(run, forth):  # type: ignore[no-untyped-def]
    """The run with its first action last, or its last one first."""
    new = np.empty_like(run)
    if forth:
        new[:-1], new[-1] = run[1:], run[0]
    else:
        new[1:], new[0] = run[:-1], run[-1]
    return new


@compiled
def peak_bytes(run, held, adds, needs, frees):  # type: ignore[no-untyped-def]
    """The most that a device holds while `run` runs, from `held` on."""
    most = 0
    for action in run:
        most = max(most, held + adds[action] + needs[action])
        held += adds[action] - frees[action]
    return most


@compiled
def held_before(rows, numbers, holds, capacity):  # type: ignore[no-untyped-def]
    """What each device holds before each place of its row; whether it has not room for all."""
    adds, _, frees = holds
    held = np.zeros(rows.shape, np.int64)
    for d in range(len(capacity)):
        held[d, 0] = numbers[10][d]
        for at in range(rows.shape[1]):
            action = rows[d, at]
            if action < 0:
                break
            held[d, at + 1] = held[d, at] + adds[action] - frees[action]
    return held, short_devices(numbers, holds, capacity)


@compiled
def best_move(  # type: ignore[no-untyped-def]
    runs, rows, place, device_of, m, ms, wires, heads, tails, starts,
    held, is_tight, holds, capacity, free_ms, is_tabu,
):  # fmt: skip
    """Of an action to an end of its run among `runs`: device, first and last place, way, 1 forth.

    Way -1: none may be made; -2: none but those that are tabu, as long as no step is under
    `free_ms`.
    """
    n, begin = len(device_of), 0
    least, chosen, first, last, way, ties = np.inf, 0, 0, 0, -1, 0
    while begin < len(runs):
        d = device_of[runs[begin] // m % n]
        end = begin + 1
        while end < len(runs) and device_of[runs[end] // m % n] == d:
            end += 1
        a, b = place[runs[begin]], place[runs[end - 1]]
        row, begin = rows[d], end
        for at in range(a, b + 1):
            for forth in range(2):
                # Two neighbours change places in one way only.
                if at == (b if forth else a) or (not forth and at == a + 1 and b == at):
                    continue
                low, high = (at, b) if forth else (a, at)
                if high - low > _REACH or passes_forward(row[at], row[low : high + 1], n, m):
                    continue
                if not can_pass(
                    row[at], row[high if forth else low], forth, m, ms, wires, heads, tails
                ):
                    continue
                run = turned(row[low : high + 1], forth)
                found_ms = reordered_ms(run, row, low, m, ms, wires, heads, tails, starts)
                if is_tabu[forth, row[at]] and found_ms >= free_ms:
                    way = -2 if way == -1 else way
                    continue
                if found_ms > least:
                    continue
                if is_tight[d]:
                    before = peak_bytes(row[low : high + 1], held[d, low], *holds)
                    after = peak_bytes(run, held[d, low], *holds)
                    if after > max(before, capacity[d]):
                        continue
                ties = ties + 1 if found_ms == least else 1
                if ties == 1 or np.random.randint(ties) == 0:
                    least, chosen, first, last, way = found_ms, d, low, high, forth
    return chosen, first, last, way


@compiled
def best_order(numbers, split, order, capacity, tries, seed):  # type: ignore[no-untyped-def]
    """The shortest step, by its chains, that so many moves from `order` come by.

    Returns its ms and its order. No move makes a device hold more than it can, or than it did. Each
    time the best of all moves is made, be it for the worse; an action that moved does not go back
    for some time, unless the step is the shortest so far then.
    """
    np.random.seed(seed)
    device_of, m = numbers[0], order.shape[2]
    rows, place = rows_by(order, device_of, len(capacity))
    ms, wires, holds = lasting(numbers, split), wired(numbers), holding(numbers, split)
    held, is_tight = held_before(rows, numbers, holds, capacity)
    heads, tails, starts = np.empty(len(ms)), np.empty(len(ms)), np.empty(_REACH + 1)
    sorted_, waits = np.empty(len(ms), np.int64), np.empty(len(ms), np.int64)
    path = np.empty(len(ms), np.int64)
    step_ms = chained(rows, place, device_of, m, ms, wires, heads, tails, sorted_, waits)
    best_ms, best = step_ms, sorted_.copy()
    since = np.zeros((2, len(ms)), np.int64)  # by way, when an action may move again
    for k in range(1, tries + 1):
        length = critical(
            rows, place, device_of, m, ms, wires, heads, tails, step_ms, path
        )  # fmt: skip
        d, first, last, way = best_move(
            path[:length], rows, place, device_of, m, ms, wires, heads, tails, starts,
            held, is_tight, holds, capacity, best_ms, since > k,
        )  # fmt: skip
        if way == -1:
            break
        if way == -2:
            since[:] = 0
            continue
        run = turned(rows[d, first : last + 1], way)
        until = k + _TENURE + np.random.randint(_TENURE)
        for at in range(first, last + 1):
            action = run[at - first]
            rows[d, at], place[action] = action, at
            held[d, at + 1] = held[d, at] + holds[0][action] - holds[2][action]
            moved = at == (last if way else first)
            since[1 - way if moved else way, action] = until
        step_ms = chained(rows, place, device_of, m, ms, wires, heads, tails, sorted_, waits)
        if step_ms < best_ms:
            best_ms, best = step_ms, sorted_.copy()
    found = np.empty(len(ms))
    for k in range(len(best)):
        found[best[k]] = k
    return best_ms, found.reshape(order.shape)
