"""What lanes that share a memory hold of it together, as predicted."""

from bisect import bisect_right
from collections.abc import Sequence

from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.runtime.trace import held, predicted


def together_bytes(estimate: EstimateSpec, lanes: Sequence[int]) -> int:
    """The most that these lanes hold at a time, if each may be an action ahead or behind.

    Memory is taken as the host launches, and no lane is just where it was predicted to be. So at
    each moment a lane counts with the most that it holds from as long before as the step's longest
    action takes until as long after. The sum over the lanes, where it is largest, is what they hold
    together. Of one lane it is the peak; of an estimate that has no memory over time the sum of the
    peaks, as if all were at their fullest at once.
    """
    if len(lanes) == 1 or not (estimate.memory and estimate.timeline):
        return sum(estimate.peak_bytes[lane] for lane in lanes)
    longest_ms = max(event.end_ms - event.start_ms for event in predicted(estimate.timeline))
    memory = held(estimate.memory)
    rows = [memory[lane] for lane in lanes]
    # Among the largest sums there is one of a span that ends as some lane comes to hold more.
    ends = {ms for row in rows for ms, _ in row}
    return max(sum(_most(row, end_ms - 2 * longest_ms, end_ms) for row in rows) for end_ms in ends)


def _most(row: Sequence[tuple[float, int]], start_ms: float, end_ms: float) -> int:
    """The most that a lane holds in a span, of (ms, bytes) after each change."""
    first = max(0, bisect_right(row, start_ms, key=_ms) - 1)
    return max(n_bytes for _, n_bytes in row[first : bisect_right(row, end_ms, key=_ms)])


def _ms(change: tuple[float, int]) -> float:
    return change[0]
