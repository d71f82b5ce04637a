"""What a stage computes again in backward, and what it keeps then, on arrays alone.

Memory is as `checkpoints.segment_cost` has it: each storage counts once, where it is kept at first.
"""

import numpy as np

from fxpipe.jit import compiled


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
def mark_again(begin, price, saved, forward_before, crossing, again):  # type: ignore[no-untyped-def]
    """Mark in `again` the blocks of a stage to compute again, where a byte kept costs `price`.

    Of all ways, the one with the least ms + price x bytes kept, if a run of such blocks kept all
    that crosses the place before it. The price falls along the stage, so that of blocks that are
    all alike some can be kept.
    """
    n = len(saved)
    # The best that ends in a block kept (0) or computed again (1), and where it came from.
    came = np.zeros((n, 2), np.int8)
    kept_cost, again_cost = 0.0, np.inf
    for k in range(n):
        forward = forward_before[begin + k + 1] - forward_before[begin + k]
        here = price * (1.5 - k / n)
        begun = kept_cost + (here * crossing[begin + k] if k > 0 else 0.0) + forward
        went_on = again_cost + forward
        came[k, 0] = 0 if kept_cost <= again_cost else 1
        came[k, 1] = 0 if begun < went_on else 1
        kept_cost = min(kept_cost, again_cost) + here * saved[k]
        again_cost = min(begun, went_on)
    state = 0 if kept_cost <= again_cost else 1
    for k in range(n - 1, -1, -1):
        again[begin + k] = state == 1
        state = came[k, state]


@compiled
def stage_memory(  # type: ignore[no-untyped-def]
    begin, end, price, forward_before, crossing,
    ends, befores, sizes, names,
    producers, value_sizes, value_names, read_ends, readers, again, present, come,
):  # fmt: skip
    """What a stage keeps of one micro-batch and what it computes again, where a byte costs `price`.

    The blocks are marked in `again`. The storages that are there are marked with `begin` in
    `present`, those that a run of such blocks brings, with its first block in `come`. Returns bytes
    kept, bytes that come again in all, those of the largest run, ms.
    """
    saved = saved_bytes(
        begin, end, ends, befores, sizes, names, producers, read_ends, readers, present
    )
    again[begin:end] = False
    if price <= 0:
        return saved.sum(), 0, 0, 0.0
    mark_again(begin, price, saved, forward_before, crossing, again)
    kept, comes, largest, run, first, ms = 0, 0, 0, 0, -1, 0.0
    for k in range(begin, end):
        for place in range(ends[k - 1] if k > 0 else 0, ends[k]):
            if not again[k] and present[names[place]] != begin:
                present[names[place]] = begin
                kept += sizes[place]
    kept += read_bytes(
        begin, end, producers, value_sizes, value_names, read_ends, readers, again, present
    )
    for k in range(begin, end):
        if not again[k]:
            continue
        if k == begin or not again[k - 1]:
            run, first = 0, k
        ms += forward_before[k + 1] - forward_before[k]
        for place in range(ends[k - 1] if k > 0 else 0, ends[k]):
            name = names[place]
            if present[name] != begin and come[name] != first:
                come[name] = first
                run += sizes[place]
                comes += sizes[place]
        largest = max(largest, run)
    return kept, comes, largest, ms


@compiled
def read_bytes(  # type: ignore[no-untyped-def]
    begin, end, producers, sizes, names, read_ends, readers, again, present,
):  # fmt: skip
    """What the runs of blocks computed `again` read of the stage before them, if not `present`."""
    kept, first, n_values = 0, begin, len(producers)
    while first < end:
        last = first
        while last < end and again[last]:
            last += 1
        before = np.searchsorted(producers, first) if last > first else 0
        for value in range(np.searchsorted(producers, begin), before):
            name = names[value]
            if present[name] == begin:
                continue
            if sent_here(value, first, last, producers, read_ends, readers):
                present[name] = begin
                kept += max(sizes[value], sizes[name] if name < n_values else 0)
        first = max(last, first + 1)
    return kept
