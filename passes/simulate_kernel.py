"""The simulator's loop over events, on arrays alone.

Devices either follow a table or choose: of what is ready and fits, the action that comes first in
`rank`. Kinds are numbers. An event is a time and a code: what happens (an action ends, a message
arrives, a message starts: in this order at one instant), the action that it comes from, and which
of its messages. Only when an instant's events are over do devices start what they can.

Actions are numbered in the order in which they start.
"""

import numpy as np

from fxpipe.jit import compiled
from fxpipe.passes.simulate_arrays_kernel import missing_arrivals, with_room
from fxpipe.passes.simulate_choice_kernel import choose, next_arrival, reserved_bytes
from fxpipe.passes.simulate_event_kernel import (
    ACTION,
    ARRIVES,
    BACKWARD,
    ENDS,
    FORWARD,
    INPUT,
    LAUNCHED,
    STARTS,
    WEIGHT,
    WHAT,
    pop,
    push,
)

# As `launched`: the host is never waited for. (In machine code a constant array would be of another
# type, and the kernel compiled once more for it.)
NOT_LAUNCHED = np.empty((2, 0))


@compiled
def run(  # type: ignore[no-untyped-def]
    row_ends, row_kinds, row_stages, row_microbatches,
    rank, split, capacity, patience, guarded,
    device_of, lasts, keeps, comes_back, workspace, recompute,
    outbox_ends, receivers, sizes, transfers, at_rest, arriving, record, launched,
):  # fmt: skip
    """Run a step: by the table if `row_ends` has a place for each device, else by `rank`.

    `lasts[kind, stage, again]` is how long an action takes, `keeps[stage, again]` what F leaves in
    memory besides messages, `comes_back[stage, again]` what the backward adds to it and
    `arriving[stage]` what I leaves for W; `workspace[kind, stage, again]` is there while it runs.
    Outbox `2 j` is what stage j sends after F, `2 j + 1` after its backward; `receivers` are
    stages. `at_rest` is what each device holds between steps. `rank[F 0 or backward 1 or W 2,
    stage, micro-batch]` says what comes first; where `split[stage, micro-batch]`, I and W run in
    place of B; who chooses leaves room for what the `guarded` oldest micro-batches of a device
    still need there. `launched`, if it is not empty, has the moments by which the host begins and
    ends to launch each action of the table: it neither starts nor ends before.

    Returns devices, kinds, stages, micro-batches, starts, ends of the actions that ran and what
    each waited for last; peak memory by device; with `record`, memory over time as devices, ms,
    bytes.
    """
    n_devices = len(at_rest)
    n_stages, n_microbatches = recompute.shape
    given = len(row_ends) == n_devices
    limit = len(row_kinds) if given else 3 * n_stages * n_microbatches
    devices, kinds, stages, microbatches = (
        np.empty(limit, np.int32), np.empty(limit, np.int8),
        np.empty(limit, np.int32), np.empty(limit, np.int32),
    )  # fmt: skip
    starts, ends = np.empty(limit), np.empty(limit)
    waited_for = np.full(limit, -1, np.int64)
    n_actions = 0
    missing = missing_arrivals(outbox_ends, receivers, n_stages, n_microbatches)
    sender = np.full((2, n_stages, n_microbatches), -1, np.int32)
    received = np.zeros((n_stages, n_microbatches), np.int64)
    halved = np.zeros((n_stages, n_microbatches), np.bool_)
    link_free = np.zeros((n_devices, n_devices))
    before = np.full(n_devices, -1, np.int64)  # the device's last action
    awaited = np.full(n_devices, -1, np.int64)  # the place in the table that it is to launch
    next_of = np.zeros(n_devices, np.int64)
    if given:
        next_of[1:] = row_ends[:-1]
    # For devices that choose: the next micro-batch of F, of the backward and of W by stage.
    nexts = np.zeros((3, n_stages), np.int64)
    oldest, promised = np.zeros(n_devices, np.int64), np.zeros(n_devices, np.int64)
    reserve, lacks_room = np.zeros(n_devices, np.int64), np.zeros(n_devices, np.bool_)
    if not given:
        reserve = reserved_bytes(
            device_of, recompute, split, workspace, comes_back, arriving, n_devices
        )
    own = np.argsort(device_of, kind="mergesort")
    own_ends = np.cumsum(np.bincount(device_of, minlength=n_devices))
    held = at_rest.copy()
    peak = held.copy()
    busy = np.zeros(n_devices, np.bool_)
    touched, n_touched = np.arange(n_devices), n_devices
    is_touched = np.ones(n_devices, np.bool_)
    log_device, log_ms, log_bytes = np.empty(64, np.int32), np.empty(64), np.empty(64, np.int64)
    n_log = 0
    # Room for two events of each device, and for messages, more where they are sent.
    times, codes, size = np.empty(64 + 3 * n_devices), np.empty(64 + 3 * n_devices, np.int64), 0
    now = 0.0
    while True:
        # The events of one instant.
        while size > 0 and times[0] == now:
            code = codes[0]
            pop(times, codes, size)
            size -= 1
            what = code >> WHAT
            action = (code >> ACTION) & ((1 << (WHAT - ACTION)) - 1)
            if what == LAUNCHED:
                if not is_touched[action]:  # it is a device
                    is_touched[action] = True
                    touched[n_touched] = action
                    n_touched += 1
                continue
            j, i, kind = stages[action], microbatches[action], kinds[action]
            d, way = device_of[j], 0 if kind == FORWARD else 1
            changed = d
            if what == ENDS:
                busy[d] = False
                again = 1 if recompute[j, i] else 0
                held[d] -= workspace[kind, j, again]
                if kind == WEIGHT:
                    held[d] -= arriving[j]
                if kind in (BACKWARD, WEIGHT):
                    held[d] -= keeps[j, again] + comes_back[j, again] + received[j, i]
                    while not given and oldest[d] < n_microbatches:
                        done = True
                        for place in range(own_ends[d - 1] if d > 0 else 0, own_ends[d]):
                            done = done and nexts[2, own[place]] > oldest[d]
                        if not done:
                            break
                        oldest[d] += 1
                # Who chooses may have waited for memory on any device.
                for e in range(n_devices):
                    if (e == d or lacks_room[e]) and not is_touched[e]:
                        is_touched[e] = True
                        touched[n_touched] = e
                        n_touched += 1
                if kind == INPUT:
                    halved[j, i] = True
                if kind != WEIGHT:
                    # Its own backward waits for F; the next stage's F, the one before's backward.
                    for k in range(2):
                        stage = j if k == 1 else (j + 1 if way == 0 else j - 1)
                        if stage < 0 or stage >= n_stages or (k == 1 and way == 1):
                            continue
                        at = way if k == 0 else 1
                        missing[at, stage, i] -= 1
                        sender[at, stage, i] = action
                        e = device_of[stage]
                        if missing[at, stage, i] == 0 and not is_touched[e]:
                            is_touched[e] = True
                            touched[n_touched] = e
                            n_touched += 1
                    box = 2 * j + way
                    begin = outbox_ends[box - 1] if box > 0 else 0
                    while size + 2 * (outbox_ends[box] - begin) + 2 * n_devices > len(times):
                        times = np.concatenate((times, np.empty_like(times)))
                        codes = np.concatenate((codes, np.empty_like(codes)))
                    for slot in range(begin, outbox_ends[box]):
                        e = device_of[receivers[slot]]
                        start = max(now, link_free[d, e])
                        link_free[d, e] = start + transfers[slot]
                        message = (action << ACTION) | (slot - begin)
                        code = (STARTS << WHAT) | message
                        push(times, codes, size, start, code)
                        code = (ARRIVES << WHAT) | message
                        push(times, codes, size + 1, link_free[d, e], code)
                        size += 2
            else:
                slot = code & ((1 << ACTION) - 1)
                box = 2 * j + way
                slot += outbox_ends[box - 1] if box > 0 else 0
                stage = receivers[slot]
                e = device_of[stage]
                if what == ARRIVES:
                    missing[way, stage, i] -= 1
                    sender[way, stage, i] = action
                    if missing[way, stage, i] == 0 and not is_touched[e]:
                        is_touched[e] = True
                        touched[n_touched] = e
                        n_touched += 1
                    continue
                if workspace[BACKWARD, stage, 0] > 0:
                    continue  # it has had its room since the action that sends it began
                changed = e
                received[stage, i] += sizes[slot]
                promised[e] -= sizes[slot]
                held[e] += sizes[slot]
                peak[e] = max(peak[e], held[e])
            if record:
                log_device, log_ms, log_bytes = with_room(log_device, log_ms, log_bytes, n_log)
                log_device[n_log], log_ms[n_log], log_bytes[n_log] = changed, now, held[changed]
                n_log += 1
        # What can start now.
        for k in range(n_touched):
            d = touched[k]
            is_touched[d] = False
            if busy[d]:
                continue
            if given:
                place = next_of[d]
                if place == row_ends[d]:
                    continue
                j, i, kind = row_stages[place], row_microbatches[place], row_kinds[place]
                ready = halved[j, i]
                if kind != WEIGHT:
                    ready = missing[0 if kind == FORWARD else 1, j, i] == 0
                if not ready:
                    continue
                if launched.size > 0 and launched[0, place] > now:
                    if awaited[d] != place:
                        awaited[d] = place
                        code = (LAUNCHED << WHAT) | (d << ACTION)
                        push(times, codes, size, launched[0, place], code)
                        size += 1
                    continue
                next_of[d] += 1
            else:
                kind, j, lacks_room[d] = choose(
                    own, own_ends[d - 1] if d > 0 else 0, own_ends[d], nexts, missing, rank, split,
                    keeps, recompute, reserve, held, promised, capacity, oldest, guarded,
                    outbox_ends, receivers, sizes, device_of, d,
                )  # fmt: skip
                if kind < 0:
                    continue
                # Rather wait for a message than begin a long action just before it comes.
                fills = kind == WEIGHT or (kind == BACKWARD and j == 0)
                if fills and patience > 0:
                    soon = next_arrival(
                        times, codes, size, d, kinds, stages, outbox_ends, receivers, device_of
                    )
                    if soon < now + patience * lasts[kind, j, 0]:
                        continue
                way = 0 if kind == FORWARD else 2 if kind == WEIGHT else 1
                i = nexts[way, j]
                nexts[way, j] += 1
                while kind != FORWARD and nexts[2, j] < nexts[1, j] and not split[j, nexts[2, j]]:
                    nexts[2, j] += 1
            way = 0 if kind == FORWARD else 1
            again = 1 if recompute[j, i] else 0
            action = n_actions
            n_actions += 1
            devices[action], kinds[action], stages[action] = d, kind, j
            microbatches[action] = i
            starts[action], ends[action] = now, now + lasts[kind, j, again]
            if given and launched.size > 0:
                ends[action] = max(ends[action], launched[1, place])
            if before[d] >= 0 and ends[before[d]] == now:
                waited_for[action] = before[d]
            elif kind != WEIGHT:
                waited_for[action] = sender[way, j, i]
            before[d] = action
            held[d] += workspace[kind, j, again]
            if kind == INPUT:
                held[d] += arriving[j]
            if kind == FORWARD:
                held[d] += keeps[j, again]
            elif kind != WEIGHT:
                held[d] += comes_back[j, again]
            if kind != WEIGHT:
                box = 2 * j + way
                for slot in range(outbox_ends[box - 1] if box > 0 else 0, outbox_ends[box]):
                    stage = receivers[slot]
                    e = device_of[stage]
                    if workspace[BACKWARD, stage, 0] == 0:
                        promised[e] += sizes[slot]
                        continue
                    received[stage, i] += sizes[slot]
                    held[e] += sizes[slot]
                    peak[e] = max(peak[e], held[e])
                    if record:
                        log_device, log_ms, log_bytes = with_room(
                            log_device, log_ms, log_bytes, n_log
                        )
                        log_device[n_log], log_ms[n_log], log_bytes[n_log] = e, now, held[e]
                        n_log += 1
            peak[d] = max(peak[d], held[d])
            if record:
                log_device, log_ms, log_bytes = with_room(log_device, log_ms, log_bytes, n_log)
                log_device[n_log], log_ms[n_log], log_bytes[n_log] = d, now, held[d]
                n_log += 1
            busy[d] = True
            push(times, codes, size, ends[action], action << ACTION)
            size += 1
        n_touched = 0
        if size == 0:
            break
        now = times[0]
    return (
        devices[:n_actions], kinds[:n_actions], stages[:n_actions], microbatches[:n_actions],
        starts[:n_actions], ends[:n_actions], waited_for[:n_actions], peak,
        log_device[:n_log], log_ms[:n_log], log_bytes[:n_log],
    )  # fmt: skip
