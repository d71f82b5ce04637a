"""Portals: how values go between stages, and which of them skip some.

A value goes straight from the stage that makes it to each that reads it. Where that is not the
next one it is a portal (torchgpipe, section 3.3): nothing is copied to the stages between.
"""

from itertools import pairwise

from fxpipe.ir import Capture, Chain, Plan, Port, StageWiring, Wiring


def wire(capture: Capture, chain: Chain, plan: Plan) -> Wiring:
    """The ops, inputs and outputs of each stage of `plan`, in the order of the program."""
    bounds = [0, *plan.cuts, len(chain.blocks)]
    place = {name: k for k, name in enumerate(capture.ops)}
    stages = [
        sorted((op for block in chain.blocks[start:end] for op in block.ops), key=place.__getitem__)
        for start, end in pairwise(bounds)
    ]
    maker: dict[str, int | None] = {op: j for j, ops in enumerate(stages) for op in ops}
    maker.update((given.name, None) for given in capture.inputs)
    taken = [_taken(capture, set(ops)) for ops in stages]
    wanted = {name for names in taken for name in names} | set(capture.outputs)
    return Wiring(
        tuple(
            StageWiring(
                ops=tuple(ops),
                inputs=tuple(
                    Port(name, maker[name], portal=maker[name] not in (None, j - 1))
                    for name in taken[j]
                ),
                outputs=tuple(op for op in ops if op in wanted),
            )
            for j, ops in enumerate(stages)
        )
    )


def _taken(capture: Capture, ops: set[str]) -> list[str]:
    """The values that `ops` read from outside, in the order of their first use.

    A stage that computes with the batch size needs a value to read it from: if nothing else tells
    it, the first of the model's inputs does.
    """
    taken: dict[str, None] = {}
    sized = False
    for node in capture.graph.nodes:
        if node.name not in ops:
            continue
        for used in node.all_input_nodes:
            if used.name in capture.specs and used.op != "get_attr" and used.name not in ops:
                taken[used.name] = None
            sized = sized or "batch" in capture.literals.get(used.name, "")
    telling = [name for name in taken if capture.mode(name) == "both"]
    if sized and not any("batch" in str(capture.specs[name]) for name in telling):
        first = next(given.name for given in capture.inputs if given.batched)
        return [first, *taken]
    return list(taken)
