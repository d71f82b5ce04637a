"""Inputs that have the batch in another dimension than 0, where nobody looks for it."""

from collections.abc import Mapping, Sequence


def turned(shapes: Mapping[str, Sequence[int]], rows: int) -> list[str]:
    """How to give those inputs that are as long as the batch of `rows` in another dimension.

    `shapes` are of inputs that go whole to each micro-batch, by name.
    """
    hints = []
    for name, shape in shapes.items():
        if rows in shape:
            dim = list(shape).index(rows)
            others = map(str, (*shape[:dim], *shape[dim + 1 :]))
            hints.append(
                f"If {name} has the batch in dimension {dim}: give it as "
                f"[{', '.join(['batch', *others])}] to a wrapper that calls the model with "
                f"{name}.movedim(0, {dim})"
            )
    return hints
