"""Moves of stages' bounds, on arrays alone: one of several that are drawn."""

import numpy as np

from fxpipe.jit import compiled
from fxpipe.passes.simulate_event_kernel import BACKWARD, FORWARD, INPUT, WEIGHT

_FARTHEST = 10
_AND_ANOTHER = 0.4  # how often a move has one more in it


@compiled
def critical_counts(kinds, stages, ends, waited_for, device_of):  # type: ignore[no-untyped-def]
    """What the path holds that a step's length hangs on.

    How often F, B, I and W of each stage, and how often a message between a stage and the next.
    """
    n_stages = len(device_of)
    counts, messages = np.zeros((4, n_stages)), np.zeros(n_stages)
    action = np.argmax(ends)
    while action >= 0:
        j = stages[action]
        counts[kinds[action], j] += 1
        action = waited_for[action]
        if action >= 0 and device_of[stages[action]] != device_of[j]:
            messages[min(j, stages[action])] += 1
    return counts, messages


@compiled
def critical_ms(  # type: ignore[no-untyped-def]
    path, counts, messages,
    forward_before, backward_before, weight_before, halving_before, message_ms,
):  # fmt: skip
    """How long what a step hangs on takes with these bounds; costs are by place."""
    ms = 0.0
    for j in range(len(path) - 1):
        begin, end = path[j], path[j + 1]
        weight = weight_before[end] - weight_before[begin]
        backward = backward_before[end] - backward_before[begin]
        ms += counts[FORWARD, j] * (forward_before[end] - forward_before[begin])
        first = backward - weight
        if j > 0:
            first += halving_before[end] - halving_before[begin]
        ms += counts[BACKWARD, j] * backward + counts[INPUT, j] * first
        ms += counts[WEIGHT, j] * weight + messages[j] * message_ms[end]
    return ms


@compiled
def shifted(path):  # type: ignore[no-untyped-def]
    """Bounds moved: one by some places with the others in proportion, or a few together.

    Each stage keeps an atom: bounds that meet move on upwards, then downwards.
    """
    n, end, new = len(path) - 1, path[-1], path.copy()
    j = np.random.randint(1, n)
    step = np.random.randint(1, _FARTHEST + 1) * (1 if np.random.random() < 0.5 else -1)
    kind = np.random.random()
    if kind < 0.4:  # the others in proportion
        to = min(max(path[j] + step, j), end - (n - j))
        for k in range(1, n):
            if k <= j:
                new[k] = round(path[k] * to / path[j])
            else:
                new[k] = end - round((end - path[k]) * (end - to) / (end - path[j]))
    else:  # one alone, or a few together
        last = j if kind < 0.7 else np.random.randint(j, n)
        for k in range(j, last + 1):
            new[k] += step
    for k in range(1, n):
        new[k] = max(new[k], new[k - 1] + 1)
    for k in range(n - 1, 0, -1):
        new[k] = min(new[k], new[k + 1] - 1)
    return new


@compiled
def computing_ms(  # type: ignore[no-untyped-def]
    path, device_of, n_microbatches, n_halved,
    forward_before, backward_before, weight_before, halving_before, message_ms,
):  # fmt: skip
    """How long each device computes in a step with these bounds.

    Of each stage, so many backwards are in halves.
    """
    ms = np.zeros(device_of.max() + 1)
    for j in range(len(path) - 1):
        begin, end = path[j], path[j + 1]
        once = forward_before[end] - forward_before[begin]
        once += backward_before[end] - backward_before[begin]
        ms[device_of[j]] += n_microbatches * once
        if j > 0:
            ms[device_of[j]] += n_halved[j] * (halving_before[end] - halving_before[begin])
    return ms


@compiled
def best_shift(path, n_drawn, seed, ran, device_of, costs):  # type: ignore[no-untyped-def]
    """Of so many moves, the one after which the step `ran` is likely to be the shortest.

    It is so long as what it hangs on, and as any device, which waits as before. `costs` are
    forward, backward, weights and halving before each place, and a message's ms there. A move that
    changes nothing is taken only where all are so.
    """
    np.random.seed(seed)
    counts, messages = critical_counts(ran[1], ran[2], ran[5], ran[6], device_of)
    n_microbatches = ran[3].max() + 1
    n_halved = np.zeros(len(device_of), np.int64)
    done_ms = np.zeros(device_of.max() + 1)
    for action in range(len(ran[5])):
        n_halved[ran[2][action]] += ran[1][action] == INPUT
        done_ms[ran[0][action]] = max(done_ms[ran[0][action]], ran[5][action])
    waiting_ms = done_ms - computing_ms(path, device_of, n_microbatches, n_halved, *costs)
    best, least = path, np.inf
    for _ in range(n_drawn):
        new = shifted(path)
        while np.random.random() < _AND_ANOTHER:
            new = shifted(new)
        if (new == path).all():
            continue
        busy_ms = computing_ms(new, device_of, n_microbatches, n_halved, *costs)
        ms = max(critical_ms(new, counts, messages, *costs), (waiting_ms + busy_ms).max())
        if ms < least:
            best, least = new, ms
    return best
