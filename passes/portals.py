"""Portals: how values go between stages, and which of them skip some.

A value goes straight from the stage that makes it to each that reads it. Where that is not the
next one it is a portal (torchgpipe, section 3.3): nothing is copied to the stages between.
"""

from itertools import pairwise

from fxpipe.ir import Capture, Chain, Plan, Port, StageWiring, Wiring
from fxpipe.ops.local_sizes import local_sizes
from fxpipe.ops.specs import where_told


def wire(capture: Capture, chain: Chain, plan: Plan) -> Wiring:
    """The ops, inputs and outputs of each stage of `plan`, in the order of the program.

    The ops of a segment stand together: those before and after it are in the chain's order to them.
    """
    bounds = [0, *plan.cuts, len(chain.blocks)]
    place = {name: k for k, name in enumerate(capture.ops)}

    def ops(begin: int, end: int) -> list[str]:
        found = [op for block in chain.blocks[begin:end] for op in block.ops]
        return sorted(found, key=place.__getitem__)

    segments = plan.segments or ((),) * (len(bounds) - 1)
    stages = []
    for (begin, end), own in zip(pairwise(bounds), segments, strict=True):
        edges = [begin, *(edge for segment in own for edge in segment), end]
        stages.append([op for pair in pairwise(edges) for op in ops(*pair)])
    maker: dict[str, int | None] = {op: j for j, own in enumerate(stages) for op in own}
    maker.update((given.name, None) for given in capture.inputs)
    taken = [_taken(capture, set(own)) for own in stages]
    wanted = {name for names in taken for name in names} | set(capture.outputs)
    return Wiring(
        tuple(
            StageWiring(
                ops=tuple(stages[j]),
                inputs=tuple(
                    Port(name, maker[name], portal=maker[name] not in (None, j - 1))
                    for name in taken[j]
                ),
                outputs=tuple(op for op in stages[j] if op in wanted),
                segments=tuple(tuple(ops(*segment)) for segment in segments[j]),
            )
            for j in range(len(stages))
        )
    )


def _taken(capture: Capture, ops: set[str]) -> list[str]:
    """The values that `ops` read from outside, in the order of their first use.

    A stage that computes with a size such as `batch` needs a value to read it from: if nothing else
    tells it, the first of the model's inputs that has it does.
    """
    taken: dict[str, None] = {}
    texts: dict[str, None] = {}
    for node in capture.graph.nodes:
        if node.name not in ops:
            continue
        for used in node.all_input_nodes:
            if used.name in capture.specs and used.op != "get_attr" and used.name not in ops:
                taken[used.name] = None
            texts[capture.literals.get(used.name, "")] = None
    telling = [capture.specs[name] for name in taken if capture.mode(name) == "both"]
    given: dict[str, None] = {}
    known = local_sizes(telling)
    for size in (size for text in texts for size in known.missing(text)):
        if not any(where_told(capture.specs[name], size) for name in given):
            has = (i.name for i in capture.inputs if where_told(capture.specs[i.name], size))
            given[next(has)] = None
    return [*given, *(name for name in taken if name not in given)]
