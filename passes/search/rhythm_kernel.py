"""Orders in which each micro-batch does as the one before it did, a period later, on arrays alone.

A *building block* says when one micro-batch's F, backward and W of each stage begin (Qi et al.,
Pipeline Parallelism with Controllable Memory, NeurIPS 2024). The sooner W comes after F, the less
devices hold.
"""

import numpy as np

from fxpipe.jit import compiled

_NOTHING = 1e-9  # ms


@compiled
def free_from(begin, lasts, begins, ends, period):  # type: ignore[no-untyped-def]
    """When, from `begin` on, a device has so long between what it does in each period.

    `begin` if that is nowhere.
    """
    at, k = begin, 0
    while k < len(begins) and at <= begin + period:
        taken = ends[k] - begins[k]
        if lasts < _NOTHING or taken < _NOTHING:
            k += 1
            continue
        since = (at - begins[k]) % period
        if since > taken - _NOTHING and since + lasts < period + _NOTHING:
            k += 1
        else:  # right after it, and all are looked at again
            at += (taken - since) % period
            k = 0
    return at if k == len(begins) else begin


@compiled
def rhythm(  # type: ignore[no-untyped-def]
    forward_ms, input_ms, weight_ms, device_of, n_microbatches, slack, pace, gap, late, apart
):  # fmt: skip
    """The order of all actions, from the ms of each stage's F, I and W.

    A period is `slack` times what the device with the most work has to do for a micro-batch. Each
    F and each I begins `pace` times as long after the one before it as that lasts, the first I
    `gap` periods after the last F, each W `late` periods after its I; or later, where actions are
    held `apart`, when the device has none of another micro-batch to do.
    """
    n = len(device_of)
    work_ms, ms = np.zeros(device_of.max() + 1), np.empty((3, n))
    ms[0], ms[1], ms[2] = forward_ms, input_ms, weight_ms
    for j in range(n):
        work_ms[device_of[j]] += ms[:, j].sum()
    period = slack * work_ms.max()
    begins, ends = np.empty((len(work_ms), 3 * n)), np.empty((len(work_ms), 3 * n))
    counts = np.zeros(len(work_ms), np.int64)
    at, now = np.empty((3 * n, n_microbatches)), 0.0
    for k in range(3 * n):
        way, j = k // n, k % n if k < n else n - 1 - k % n
        d, lasts = device_of[j], ms[way, j]
        if k == n:
            now += gap * period
        if way == 2:
            now = at[2 * n - 1 - j, 0] + ms[1, j] + late * period
        if apart:
            now = free_from(now, lasts, begins[d, : counts[d]], ends[d, : counts[d]], period)
        begins[d, counts[d]], ends[d, counts[d]] = now, now + lasts
        counts[d] += 1
        for i in range(n_microbatches):
            at[k, i] = now + i * period
        now += pace * lasts
    # What begins at the same time, as where stages take none, goes as it can run.
    rank, order = np.empty(at.size), np.empty((3, n, n_microbatches))
    rank[np.argsort(at.ravel(), kind="mergesort")] = np.arange(at.size)
    for k in range(3 * n):
        j = k % n if k < n else n - 1 - k % n
        order[k // n, j] = rank[k * n_microbatches : (k + 1) * n_microbatches]
    return order
