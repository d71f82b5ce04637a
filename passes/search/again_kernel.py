"""What a stage computes again in backward, and what it keeps then, on arrays alone.

Memory is as `checkpoints.segment_cost` has it: each storage counts once, where it is kept at first.
"""

import numpy as np

from fxpipe.jit import compiled

# What is marked of each block: it keeps what it saves, or is computed again, as the first of its
# segment or as one more.
KEPT, FIRST, MORE = 0, 1, 2


@compiled
def sent_here(value, begin, end, producers, read_ends, readers):  # type: ignore[no-untyped-def]
    """Whether the blocks [begin, end) are sent this storage: a value made before, read by one."""
    if value >= len(producers) or producers[value] >= begin:
        return False
    for r in range(read_ends[value - 1] if value > 0 else 0, read_ends[value]):
        if begin <= readers[r] < end:
            return True
    return False


@compiled
def saved_bytes(  # type: ignore[no-untyped-def]
    begin, end, ends, befores, sizes, names, producers, read_ends, readers, present,
):  # fmt: skip
    """What each of the blocks [begin, end) saves first; what they are sent is `present`."""
    saved = np.zeros(end - begin, np.int64)
    for k in range(begin, end):
        for place in range(ends[k - 1] if k > 0 else 0, ends[k]):
            if befores[place] >= begin:
                continue
            if sent_here(names[place], begin, end, producers, read_ends, readers):
                present[names[place]] = begin
            else:
                saved[k - begin] += sizes[place]
    return saved


@compiled
def mark_again(  # type: ignore[no-untyped-def]
    begin, price, share, saved, forward_before, crossing, again
):  # fmt: skip
    """Mark in `again` the blocks of a stage to compute again, where a byte kept costs `price`.

    Of all ways, that of the least ms + price x (bytes kept + `share` x bytes of the largest
    segment), if a segment kept all that crosses the place before it. How large one may be is halved
    for as long as that pays.
    """
    best, limit = np.inf, saved.sum()
    while True:
        cost, starts, largest = _within(begin, price, limit, saved, forward_before, crossing)
        cost += price * share * largest
        if cost >= best:
            return
        best, limit = cost, largest // 2
        again[begin : begin + len(saved)] = KEPT
        for k in range(len(saved)):
            if starts[k] >= 0:
                again[begin + k] = FIRST if starts[k] == k else MORE
        if share == 0:
            return  # how large they are costs nothing


@compiled
def _within(begin, price, limit, saved, forward_before, crossing):  # type: ignore[no-untyped-def]
    """The best way whose segments save at most `limit` bytes, where larger ones cost nothing.

    Returns what it costs, of each block where its segment starts or -1, and the bytes of the
    largest. The price falls along the stage, so that of blocks that are all alike some can be kept.
    """
    n = len(saved)
    # The best that ends in a block kept, or in a segment; where that started, and what it is worth
    # to start one at each place. Of the places that are near enough, `queue` has those that may
    # still be the best, each worth less than the ones behind it.
    kept_cost, again_cost = np.zeros(n + 1), np.full(n + 1, np.inf)
    came, worth = np.zeros(n + 1, np.int64), np.empty(n)
    queue, head, tail = np.empty(n, np.int64), 0, 0
    left, room = 0, limit
    for k in range(n):
        here = price * (1.5 - k / n)
        best = min(kept_cost[k], again_cost[k])
        before = here * crossing[begin + k] if k > 0 else 0.0
        worth[k] = best + before - forward_before[begin + k]
        while tail > head and worth[queue[tail - 1]] > worth[k]:
            tail -= 1
        queue[tail] = k
        tail += 1
        room -= saved[k]
        while room < 0:
            room += saved[left]
            left += 1
        while head < tail and queue[head] < left:
            head += 1
        kept_cost[k + 1] = best + here * saved[k]
        if head < tail:
            came[k + 1] = queue[head]
            again_cost[k + 1] = worth[queue[head]] + forward_before[begin + k + 1]
    starts, largest, k = np.full(n, -1), 0, n
    while k > 0:
        if kept_cost[k] <= again_cost[k]:
            k -= 1
            continue
        starts[came[k] : k] = came[k]
        largest = max(largest, saved[came[k] : k].sum())
        k = came[k]
    return min(kept_cost[n], again_cost[n]), starts, largest


@compiled
def stage_memory(  # type: ignore[no-untyped-def]
    begin, end, price, share, forward_before, crossing,
    ends, befores, sizes, names,
    producers, value_sizes, value_names, read_ends, readers, again, present, come,
):  # fmt: skip
    """What a stage keeps of one micro-batch and what it computes again, where a byte costs `price`.

    The blocks are marked in `again`, as `mark_again` says. The storages that are there are marked
    with `begin` in `present`, those that a segment brings, with its first block in `come`. Returns
    bytes kept, bytes that come again in all, those of the largest segment, ms.
    """
    saved = saved_bytes(
        begin, end, ends, befores, sizes, names, producers, read_ends, readers, present
    )
    again[begin:end] = KEPT
    if price <= 0:
        return saved.sum(), 0, 0, 0.0
    mark_again(begin, price, share, saved, forward_before, crossing, again)
    kept, comes, largest, brings, first, ms = 0, 0, 0, 0, -1, 0.0
    for k in range(begin, end):
        for place in range(ends[k - 1] if k > 0 else 0, ends[k]):
            if again[k] == KEPT and present[names[place]] != begin:
                present[names[place]] = begin
                kept += sizes[place]
    kept += read_bytes(
        begin, end, producers, value_sizes, value_names, read_ends, readers, again, present
    )
    for k in range(begin, end):
        if again[k] == KEPT:
            continue
        if again[k] == FIRST:
            brings, first = 0, k
        ms += forward_before[k + 1] - forward_before[k]
        for place in range(ends[k - 1] if k > 0 else 0, ends[k]):
            name = names[place]
            if present[name] != begin and come[name] != first:
                come[name] = first
                brings += sizes[place]
                comes += sizes[place]
        largest = max(largest, brings)
    return kept, comes, largest, ms


@compiled
def read_bytes(  # type: ignore[no-untyped-def]
    begin, end, producers, sizes, names, read_ends, readers, again, present,
):  # fmt: skip
    """What the segments read of the stage before them, if not `present`."""
    kept, first, n_values = 0, begin, len(producers)
    while first < end:
        last = first + 1
        while last < end and again[last] == MORE:
            last += 1
        before = np.searchsorted(producers, first) if again[first] == FIRST else 0
        for value in range(np.searchsorted(producers, begin), before):
            name = names[value]
            if present[name] == begin:
                continue
            if sent_here(value, first, last, producers, read_ends, readers):
                present[name] = begin
                kept += max(sizes[value], sizes[name] if name < n_values else 0)
        first = last
    return kept
