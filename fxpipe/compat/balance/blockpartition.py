"""A sequence of costs cut into blocks of about equal sums.

After Bárány and Grinberg, "Block partitions of sequences" (arXiv 1308.2452): from the smallest
block, a step towards the largest, until they differ by no more than one cost can.
"""

from collections.abc import Sequence


def solve(sequence: Sequence[int], partitions: int = 1) -> list[list[int]]:
    """`partitions` blocks. Raises ValueError if there are fewer numbers than blocks."""
    if partitions < 1:
        raise ValueError(f"partitions must be a positive integer ({partitions} < 1)")
    n = len(sequence)
    if n < partitions:
        raise ValueError(f"sequence is shorter than intended partitions ({n} < {partitions})")
    low, high = min(sequence), max(sequence)
    costs = [(cost - low) / ((high - low) or 1) for cost in sequence]
    ends = [n // partitions * k for k in range(1, partitions)] + [n]

    def begin(k: int) -> int:
        return ends[k - 1] if k else 0

    def size(k: int) -> float:
        return sum(costs[begin(k) : ends[k]])

    largest = max(range(partitions), key=size)
    while True:
        distances = {k: (size(k), abs(k - largest)) for k in range(partitions)}
        smallest = min(distances, key=lambda k: distances[k])
        if size(largest) <= size(smallest) + 1:
            return [list(sequence[begin(k) : ends[k]]) for k in range(partitions)]
        # It takes over a cost of its neighbour on the side of the largest.
        if smallest < largest:
            neighbour = smallest + 1
            ends[smallest] += 1
        else:
            neighbour = smallest - 1
            ends[neighbour] -= 1
        if neighbour == largest:
            largest = max(range(partitions), key=size)
