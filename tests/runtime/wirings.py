"""Which stage reads what, made up."""

from fxpipe.runtime.portal import CALLER, Wire, Wires


def wires_of(n: int, *skips: tuple[int, int]) -> Wires:
    """A chain of n stages and the end; `skips` are further readers, each with its source."""
    reads: list[list[Wire]] = [[Wire(j - 1, f"x{j - 1}")] for j in range(n + 1)]
    reads[0] = [Wire(CALLER, "x")]
    for source, reader in skips:
        reads[reader].append(Wire(source, "x" if source == CALLER else f"x{source}"))
    readers: dict[Wire, list[int]] = {}
    for j, wires in enumerate(reads):
        for wire in wires:
            readers.setdefault(wire, []).append(j)
    return Wires(tuple(map(tuple, reads)), {w: tuple(js) for w, js in readers.items()})
