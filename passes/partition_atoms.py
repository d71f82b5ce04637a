"""What the atoms of a chain cost in whole numbers, as CP-SAT takes them."""

from dataclasses import dataclass

from fxpipe.ir import Link
from fxpipe.passes.partition import Problem

# A unit of memory.
BYTES_PER_UNIT = 1024


@dataclass(frozen=True, slots=True)
class Atoms:
    """Costs by atom, rounded down; of boundaries, by the atom after.

    `received_saved` are those received values that some backward saves: they are in `saved` too.
    """

    forward: list[int]
    backward: list[int]
    send: list[int]
    back: list[int]
    static: list[int]
    saved: list[int]
    received: list[int]
    received_saved: list[int]
    input: list[int]
    weight: list[int]


def atoms_of(problem: Problem, unit_ms: float) -> Atoms:
    """Those between the places where a stage may begin, a unit of time being `unit_ms`."""
    chain, edges = problem.chain, problem.edges
    atom_of = [a for a in range(len(edges) - 1) for _ in range(edges[a], edges[a + 1])]
    atoms = Atoms(*([0] * (len(edges) - 1) for _ in range(10)))
    value_bytes = {value.name: value.bytes for value in chain.values}
    seen: set[tuple[str, str]] = set()
    for block, a in zip(chain.blocks, atom_of, strict=True):
        atoms.forward[a] += int(block.forward_ms / unit_ms)
        atoms.backward[a] += int(block.backward_ms / unit_ms)
        atoms.input[a] += int((block.backward_ms - block.weight_gradient_ms) / unit_ms)
        atoms.weight[a] += int(block.weight_gradient_ms / unit_ms)
        for kind, factor, held in (
            ("parameters", 1 + problem.training_factor, atoms.static),
            ("buffers", 1, atoms.static),
            ("saved", 1, atoms.saved),
        ):
            for name, size in getattr(block, kind):
                if (kind, name) not in seen:
                    # A stage that receives what it saves holds the value, not its whole storage.
                    size = min(size, value_bytes.get(name, size)) if kind == "saved" else size
                    held[a] += int(factor * size / BYTES_PER_UNIT)
                    seen.add((kind, name))
    sent, back = ([0] * (len(edges) - 1) for _ in range(2))
    for value in chain.values:
        readers = {atom_of[k] for k in value.consumers if k < len(atom_of)}
        if value.producer >= 0 and (after := atom_of[value.producer] + 1) in readers:
            sent[after] += value.bytes
            back[after] += value.bytes if value.gradient else 0
            is_saved = ("saved", value.memory) in seen
            held = atoms.received_saved if is_saved else atoms.received
            held[after] += value.bytes // BYTES_PER_UNIT
    links = (problem.network.link, *problem.network.pairs.values())
    fastest = Link(min(x.latency_ms for x in links), max(x.bytes_per_ms for x in links))
    for sizes, delays in ((sent, atoms.send), (back, atoms.back)):
        delays[:] = (int(fastest.transfer_ms(b) / unit_ms) if b else 0 for b in sizes)
    return atoms
