"""The least that messages take between runs of blocks that are not too long, on arrays alone."""

import numpy as np

from fxpipe.jit import compiled


@compiled
def least_messages_ms(begins, messages, longest_ms, late_ms, longest_late_ms, until_ms):  # type: ignore[no-untyped-def]
    """Between runs up to the one that lies at `until_ms` of the forward; infinite if none may.

    A run may begin at each of `begins` but the last, the chain's end, after one of `messages`.
    Those that begin before `late_ms` are no longer than `longest_ms`, others than
    `longest_late_ms`, which is no less.
    """
    # Of the places behind which a run may begin that are near enough, with the least that messages
    # take up to there: those farther on come after those that take less.
    n = len(begins)
    near, taken_ms = np.zeros(n, np.int64), np.zeros(n)
    first, end = 0, 1
    for k in range(1, n):
        reached_ms = min(begins[k], until_ms)
        while first < end:
            begin_ms = begins[near[first]]
            most_ms = longest_ms if begin_ms < late_ms else longest_late_ms
            if begin_ms + most_ms * (1 + 1e-9) >= reached_ms:
                break
            first += 1
        if first == end:
            return np.inf
        if begins[k] >= until_ms or k == n - 1:
            break
        new_ms = taken_ms[first] + messages[k - 1]
        while end > first and taken_ms[end - 1] >= new_ms:
            end -= 1
        near[end], taken_ms[end] = k, new_ms
        end += 1
    return taken_ms[first]
