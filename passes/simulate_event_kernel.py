"""A heap of events, times and codes in two arrays: the earliest first, then the lowest code.

A code says what happens (at one instant in the order given here), the action that it comes from,
and which of its messages.
"""

from fxpipe.jit import compiled

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)  # kinds of actions
ENDS, ARRIVES, STARTS, LAUNCHED = range(4)  # an action, a message, a message, an action
WHAT, ACTION = 60, 20  # a code in bits: what from 60 on, action from 20 on, message


@compiled
def push(times, codes, size, time, code):  # type: ignore[no-untyped-def]
    """Put an event into the heap of `size`, which has room for it."""
    k = size
    while k > 0:
        above = (k - 1) >> 1
        if times[above] < time or (times[above] == time and codes[above] < code):
            break
        times[k], codes[k] = times[above], codes[above]
        k = above
    times[k], codes[k] = time, code


@compiled
def pop(times, codes, size):  # type: ignore[no-untyped-def]
    """Take the first event off a heap of `size`: the last one takes its place and sinks."""
    last = size - 1
    time, code = times[last], codes[last]
    k = 0
    while True:
        below = 2 * k + 1
        if below >= last:
            break
        other = below + 1
        if other < last and (
            times[other] < times[below]
            or (times[other] == times[below] and codes[other] < codes[below])
        ):
            below = other
        if time < times[below] or (time == times[below] and code < codes[below]):
            break
        times[k], codes[k] = times[below], codes[below]
        k = below
    times[k], codes[k] = time, code
