"""Schedules whose backwards are halved: the weights' gradients fill what would be waiting.

I, the gradient of a stage's inputs, is what the stage before waits for; W, that of its weights,
nobody waits for, so it may come later. Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR
2024), and Pipeline Parallelism with Controllable Memory (NeurIPS 2024). Bubbles are those where F,
I and W take equally long and messages nothing.
"""

from itertools import count

from fxpipe.schedule import Action, Kind, Schedule


def zero_bubble_h1(n_stages: int, n_microbatches: int) -> Schedule:
    """1F1B's forwards; stage j computes weights' gradients j micro-batches later.

    What is left over fills the wait at the end: a third of 1F1B's bubble. Memory: min(m, n)
    micro-batches are in flight on every stage. Source: Zero Bubble, section 2.1.
    """
    return _trailing(n_stages, n_microbatches, [(n_stages - j, j) for j in range(n_stages)])


def zero_bubble_h2(n_stages: int, n_microbatches: int) -> Schedule:
    """So many more forwards ahead that no device waits once it began, from m = 2n - 1 on.

    The step is no shorter than under `zero_bubble_h1` if all devices begin and end it together;
    but a device may go on to its optimizer at once, and where communication delays what is sent,
    there is more to do meanwhile. Memory: min(m, 2n - 1) micro-batches are in flight on every
    stage. Source: Zero Bubble, section 2.2.
    """
    stages = range(n_stages)
    return _trailing(n_stages, n_microbatches, [(2 * (n_stages - j) - 1, 2 * j) for j in stages])


def _trailing(n_stages: int, n_microbatches: int, leads: list[tuple[int, int]]) -> Schedule:
    """By stage: how many F come before the first I, and by how many micro-batches W trails I."""
    m = n_microbatches
    rows = []
    for j, (ahead, behind) in zip(range(n_stages), leads, strict=True):
        row = [Action(j, Kind.FORWARD, i) for i in range(min(ahead, m))]
        for i in range(m + behind):
            if i < m:
                row.append(Action(j, Kind.INPUT, i))
            if behind <= i:
                row.append(Action(j, Kind.WEIGHT, i - behind))
            if ahead + i < m:
                row.append(Action(j, Kind.FORWARD, ahead + i))
        rows.append(tuple(row))
    return Schedule(tuple(rows))


def zero_bubble_v(n_devices: int, n_microbatches: int) -> Schedule:
    """Two stages a device in the shape of a V: device d of p holds the stages d and 2p - 1 - d.

    The last stage is on the first device, and each micro-batch returns there soon. A sixth of
    1F1B's bubble. Memory: at most min(2m, 2p) pairs of stage and micro-batch are in flight on a
    device, as much as the p micro-batches of 1F1B's first device in stages of half the size.
    Source: Zero Bubble, section 6; Controllable Memory calls it V-ZB.
    """
    p = n_devices
    m = max(n_microbatches, 2 * p - 1)  # fewer are the table of these without the last
    rows = []
    for d in range(p):
        # F, I, W of the stage on the way down the V in small letters, of that on the way up in
        # capitals; each letter takes its next micro-batch.
        letters = (
            "f" * (2 * (p - d) - 1)
            + "Ff" * d
            + "FIW" * (p - d)
            + "fiwFIW" * (m - 2 * p + 1 + d)
            + "iwFIW" * (p - 1 - d)
            + "iI" * d
            + "iw" * (p - d)
            + "W" * d
            + "w" * d
        )
        counts = {letter: count() for letter in "fiwFIW"}
        stages = {True: d, False: 2 * p - 1 - d}
        rows.append(
            tuple(
                Action(stages[letter.islower()], Kind(letter.upper()), next(counts[letter]))
                for letter in letters
            )
        )
    return Schedule(tuple(rows)).first(n_microbatches)
