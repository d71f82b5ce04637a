"""Orders of actions, on arrays alone: ranks to choose by, and better ones from a step that ran.

The latest times at which a step's actions could have started are the next try's ranks.
"""

import numpy as np

from fxpipe.jit import compiled
from fxpipe.passes.search.shop_kernel import holding, order_of, short_devices, table_by
from fxpipe.passes.simulate_event_kernel import BACKWARD, FORWARD, INPUT, WEIGHT
from fxpipe.passes.simulate_kernel import run


@compiled
def first_ranks(n_stages, n_microbatches, group):  # type: ignore[no-untyped-def]
    """Ranks to begin with: a backward before a forward before a W.

    Forwards go through the stages in groups of micro-batches, as do backwards; the deeper a stage,
    the later its forward and the earlier its backward within the group.
    """
    rank = np.empty((3, n_stages, n_microbatches))
    total = float(n_stages * n_microbatches)
    for j in range(n_stages):
        for i in range(n_microbatches):
            place = (i // group) * n_stages * group + i % group
            rank[0, j, i] = total + place + j * group
            rank[1, j, i] = place + (n_stages - 1 - j) * group
            rank[2, j, i] = 4 * total + i * n_stages + n_stages - 1 - j
    return rank


@compiled
def latest_starts(  # type: ignore[no-untyped-def]
    devices, kinds, stages, microbatches, starts, ends, numbers, n_devices
):  # fmt: skip
    """When each action of a step that ran had to start at the latest, if its order is kept."""
    recompute = numbers[5]
    outbox_ends, receivers, transfers = numbers[6], numbers[7], numbers[9]
    n_stages, n_microbatches = recompute.shape
    step_ms = 0.0
    for action in range(len(ends)):
        step_ms = max(step_ms, ends[action])
    latest = np.full((3, n_stages, n_microbatches), step_ms)
    next_start = np.full(n_devices, step_ms)
    for action in range(len(kinds) - 1, -1, -1):
        j, i, kind = stages[action], microbatches[action], kinds[action]
        end = next_start[devices[action]]
        if kind == FORWARD:
            end = min(end, latest[1, j, i])
            if j + 1 < n_stages:
                end = min(end, latest[0, j + 1, i])
        elif kind in (INPUT, BACKWARD):
            if kind == INPUT:
                end = min(end, latest[2, j, i])
            if j > 0:
                end = min(end, latest[1, j - 1, i])
        if kind != WEIGHT:
            way = 0 if kind == FORWARD else 1
            box = 2 * j + way
            for slot in range(outbox_ends[box - 1] if box > 0 else 0, outbox_ends[box]):
                end = min(end, latest[way, receivers[slot], i] - transfers[slot])
        start = end - (ends[action] - starts[action])
        next_start[devices[action]] = start
        latest[0 if kind == FORWARD else 2 if kind == WEIGHT else 1, j, i] = start
    return latest


@compiled
def judge(ran, n_needed, capacity):  # type: ignore[no-untyped-def]
    """How many bytes a step is over the capacity, and its ms; over by all there is if it stuck."""
    if len(ran[0]) < n_needed:
        return 1 << 60, np.inf
    over, step_ms = 0, 0.0
    for d in range(len(capacity)):
        over += max(0, ran[7][d] - capacity[d])
    for end in ran[5]:
        step_ms = max(step_ms, end)
    return over, step_ms


@compiled
def as_table(ran, numbers, split, n_devices):  # type: ignore[no-untyped-def]
    """The step of the table that a step which ran makes.

    Devices that choose wait for room, even while another action could run; those of a table do not.
    """
    rows = table_by(order_of(ran, *split.shape), split, numbers[0], n_devices)
    return run(
        *rows, np.empty((0, 0, 0)), np.empty((0, 0), np.bool_), np.empty(0, np.int64), 0.0, 0,
        *numbers, False, np.empty((2, 0)),
    )  # fmt: skip


@compiled
def attempt(numbers, split, capacity, groups, patiences, guarded, rounds):  # type: ignore[no-untyped-def]
    """The best step of these stages that choosing by rank finds, from several first ranks.

    Each is tried `rounds` times: with less room where it was too large, else with its latest starts
    as ranks, and devices leave room for as many of their oldest micro-batches as are `guarded`.
    Where memory is short, a step has to fit as a table too. Returns bytes over, ms,
    actions simulated, and the step that ran.
    """
    n_stages, n_microbatches = numbers[5].shape
    n_needed = 2 * n_stages * n_microbatches + split.sum()
    no_rows = np.empty(0, np.int64)
    no_kinds, no_stages = np.empty(0, np.int8), np.empty(0, np.int32)
    rank = first_ranks(n_stages, n_microbatches, groups[0])
    best = run(
        no_rows, no_kinds, no_stages, no_stages, rank, split, capacity, patiences[0], guarded,
        *numbers, False, np.empty((2, 0)),
    )  # fmt: skip
    work = len(best[0])
    best_over, best_ms = 1 << 61, np.inf
    short = short_devices(numbers, holding(numbers, split), capacity).any()
    for k in range(len(groups)):
        rank = first_ranks(n_stages, n_microbatches, groups[k])
        room = capacity.copy()
        for r in range(rounds):
            ran = best
            if k > 0 or r > 0:
                ran = run(
                    no_rows, no_kinds, no_stages, no_stages, rank, split, room, patiences[k],
                    guarded, *numbers, False, np.empty((2, 0)),
                )  # fmt: skip
                work += len(ran[0])
            over, step_ms = judge(ran, n_needed, capacity)
            if short and over == 0 and (best_over > 0 or step_ms < best_ms):
                ran = as_table(ran, numbers, split, len(capacity))
                work += len(ran[0])
                over, step_ms = judge(ran, n_needed, capacity)
            if over < best_over or (over == best_over and step_ms < best_ms):
                best_over, best_ms, best = over, step_ms, ran
            if len(ran[0]) < n_needed:
                break
            if over > 0:
                room = room - np.maximum(ran[7] - capacity, 0)
            else:
                rank = latest_starts(*ran[:6], numbers, len(capacity))
    return best_over, best_ms, work, best
