"""Prices of memory at which a step fits: what each device computes again, and no more of it.

While the order of actions stands, what a device holds hangs on its own stages alone. So all devices
are tried at once, each at a price of its own.
"""

from dataclasses import replace

import numpy as np

from fxpipe.passes.search.judge import Found, Judge


def fitted(judge: Judge, found: Found, reach: int = 1) -> Found:
    """`found` in its order, each device computing again as little as its memory allows.

    The prices of a device's stages move by as many steps, `reach` at first, then twice as many,
    until it is known how many are enough.
    """
    candidate, last = found.candidate, len(judge.prices) - 1
    if last == 0 or (not found.worth[0] and not any(candidate.prices)):
        return found
    device_of, steps, work = list(candidate.device_of), np.array(candidate.prices), found.work
    # Of each device, what is too little and the least that is enough, as far as that is known.
    least, most = -steps.max(), last - steps.min()
    fits = found.peak_bytes <= judge.capacity
    too_little, enough = np.where(fits, least - 1, 0), np.where(fits, 0, most + 1)
    while True:
        is_open = enough - too_little > 1
        by = (too_little + enough) // 2
        by = np.where(too_little < least, np.maximum(enough - reach, least), by)
        by = np.where(enough > most, np.minimum(too_little + reach, most), by)
        by = np.where(is_open, by, np.minimum(enough, most))
        tried = judge.at_prices(found, tuple(np.clip(steps + by[device_of], 0, last).tolist()))
        work += tried.work
        if not is_open.any():
            break
        fits = tried.peak_bytes <= judge.capacity
        enough = np.where(is_open & fits, by, enough)
        too_little = np.where(is_open & ~fits, by, too_little)
        reach *= 2
    return replace(min(found, tried, key=lambda one: one.worth), work=work)
