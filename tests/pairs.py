"""Rows of parameters that bring every two values together, without all rows that there are."""

from itertools import combinations, product


def all_pairs(*axes):
    """Rows with a value of each axis, such that any two values of two axes are in one row.

    So a fault that shows wherever two values meet is found as by the full product.
    """
    rows = [*product(*axes)]
    pairs = [{*combinations(enumerate(row), 2)} for row in rows]
    left = set().union(*pairs)
    chosen = []
    while left:
        best = max(range(len(rows)), key=lambda k: len(pairs[k] & left))
        chosen.append(rows[best])
        left -= pairs[best]
    return chosen
