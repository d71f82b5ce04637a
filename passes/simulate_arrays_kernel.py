"""Arrays of the simulator's loop: what each action waits for, and memory over time."""

import numpy as np

from fxpipe.jit import compiled


@compiled
def missing_arrivals(outbox_ends, receivers, n_stages, n_microbatches):  # type: ignore[no-untyped-def]
    """For F (0) and the backward (1) of each stage and micro-batch: how much it waits for."""
    missing = np.zeros((2, n_stages, n_microbatches), np.int32)
    for j in range(n_stages):
        missing[0, j] += 1 if j > 0 else 0
        missing[1, j] += 2 if j < n_stages - 1 else 1
    for box in range(2 * n_stages):
        begin = outbox_ends[box - 1] if box > 0 else 0
        for slot in range(begin, outbox_ends[box]):
            missing[box % 2, receivers[slot]] += 1
    return missing


@compiled
def with_room(log_device, log_ms, log_bytes, n_log):  # type: ignore[no-untyped-def]
    """The log, in arrays twice as long where these are full."""
    if n_log < len(log_ms):
        return log_device, log_ms, log_bytes
    return (
        np.concatenate((log_device, np.empty_like(log_device))),
        np.concatenate((log_ms, np.empty_like(log_ms))),
        np.concatenate((log_bytes, np.empty_like(log_bytes))),
    )
