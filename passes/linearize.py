"""Linearization: the graph as a chain of blocks, and what crosses each place between them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx, nn

from fxpipe.ir import Block, Capture, Chain, OpCost, Profile, Value, own_storage
from fxpipe.ops.fullest import fullest
from fxpipe.ops.liveness import Needed, workspaces
from fxpipe.passes.linearize_blocks import blocks_of, state_of_call


def linearize(capture: Capture, profile: Profile) -> Chain:
    """The blocks of ops with their costs, and the values that go between them.

    Raises CaptureError if the model has no ops to place.
    """
    blocks = blocks_of(capture)
    nodes = {node.name: node for node in capture.graph.nodes}
    block_of = {name: k for k, block in enumerate(blocks) for name in block}
    block_of.update((given.name, -1) for given in capture.inputs)
    readers: dict[str, set[int]] = {}
    for name, k in block_of.items():
        for used in nodes[name].all_input_nodes:
            readers.setdefault(used.name, set()).add(k)
    for name in capture.outputs:
        readers.setdefault(name, set()).add(len(blocks))
    value_bytes = _value_bytes(capture, profile)
    loss = profile.loss
    values: list[Value] = []
    for name, producer in block_of.items():
        consumers = tuple(sorted(readers.get(name, set()) - {producer}))
        if consumers and name in capture.specs:
            view_of = capture.ops[name].storage if name in capture.ops else name
            value = Value(
                name,
                value_bytes[name],
                producer,
                consumers,
                capture.specs[name].requires_grad,
                view_of=None if view_of == name else view_of,
            )
            values += _apart(value, len(blocks)) if loss and name in loss.unused else [value]
    order = [name for block in blocks for name in block]
    needed, loss_bytes = workspaces(capture, profile.costs, order, value_bytes, loss)
    # The caller gives their gradients, which a stage holds as what it is given.
    returned = {v.name: v.bytes for v in values if v.gradient and v.consumers[-1] == len(blocks)}
    *others, last = (
        _block(capture, profile, [nodes[name] for name in block], needed, returned)
        for block in blocks
    )
    # The loss is taken as the last forward ends, but it is not computed again where that is.
    backward_ms = last.backward_ms + (loss.ms if loss else 0.0)
    last = replace(last, backward_ms=backward_ms, loss_bytes=loss_bytes)
    return Chain(
        blocks=(*others, last),
        values=tuple(values),
        cuttable=(True,) * len(blocks),
        divides=tuple(_divides(capture, nodes, blocks)),
        action_ms=profile.action_ms,
        library_bytes=profile.library_bytes,
    )


def _value_bytes(capture: Capture, profile: Profile) -> dict[str, int]:
    """Of each value of a micro-batch."""
    sizes = {**capture.sizes, "batch": profile.batch}
    known = {name: spec.bytes(sizes) for name, spec in capture.specs.items()}
    return known | dict(profile.unknown_bytes)


def _apart(value: Value, caller: int) -> Iterator[Value]:
    """What blocks read of a value, and what the caller is sent, who gives no gradient of it."""
    readers = tuple(k for k in value.consumers if k != caller)
    if readers:
        yield replace(value, consumers=readers)
    yield replace(value, name=f"{value.name}/returned", consumers=(caller,), gradient=False)


def _divides(
    capture: Capture, nodes: Mapping[str, fx.Node], blocks: Sequence[Sequence[str]]
) -> Iterable[int]:
    """How many modules have forward lines both before and after each place between blocks."""
    for before, after in pairwise(blocks):
        above = [_callers(capture, nodes[name]) for name in (before[-1], after[0])]
        same = [a == b for a, b in zip(*above, strict=False)]
        yield [*same, False].index(False)
    yield 0


def _callers(capture: Capture, node: fx.Node) -> list[str]:
    """The modules, outermost first, in whose forward the op's line is."""
    path = capture.ops[node.name].module.split(".")
    return path[:-1] if node.op == "call_module" else path


def _block(
    capture: Capture,
    profile: Profile,
    nodes: Sequence[fx.Node],
    needed: Mapping[str, Needed],
    returned: Mapping[str, int],
) -> Block:
    free = OpCost(0.0, 0.0)  # what eval mode alone runs costs a training step nothing
    costs = [profile.costs.get(node.name, free) for node in nodes]
    parameters: dict[str, int] = {}
    buffers: dict[str, int] = {}
    trained: dict[str, int] = {}
    states = [_state(capture, node) for node in nodes]
    for cost, (weights, others) in zip(costs, states, strict=True):
        parameters |= weights
        trained |= {name: n for name, n in weights.items() if name not in cost.shapes_of}
        buffers |= others
    written = {storage for node in nodes for storage in capture.ops[node.name].mutates}
    names = [node.name for node in nodes]
    arriving = [
        max(0, cost.arriving_bytes - returned.get(name, 0))
        for name, cost in zip(names, costs, strict=True)
    ]
    reads = [read for read, _ in states]
    most = fullest(names, costs, [needed[name] for name in names], reads, arriving)
    return Block(
        ops=tuple(names),
        forward_ms=sum(cost.forward_ms for cost in costs),
        backward_ms=sum(cost.backward_ms for cost in costs),
        saved=tuple({name: size for cost in costs for name, size in cost.saved}.items()),
        parameters=tuple(parameters.items()),
        buffers=tuple(buffers.items()),
        forward_workspace_bytes=most.forward_bytes,
        # A byte at least: that a bare chain's blocks need nothing is how they are known.
        backward_workspace_bytes=max(1, most.backward_bytes),
        weight_gradient_ms=sum(cost.weight_gradient_ms for cost in costs),
        arriving_bytes=sum(arriving),
        halving_ms=sum(cost.halving_ms for cost in costs),
        written_bytes=sum(size for name, size in buffers.items() if own_storage(name) in written),
        input_workspace_bytes=most.input_bytes,
        weight_workspace_bytes=most.weight_bytes,
        waiting=most.waiting,
        returning=most.returning,
        trained=tuple(trained.items()),
    )


def _state(capture: Capture, node: fx.Node) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of what the op reads of the model: parameters that are trained, and the rest.

    A frozen parameter has no gradient and no optimizer's state: it is held as a buffer is.
    """
    read = [used for used in node.all_input_nodes if used.op == "get_attr"]
    names = [capture.first_name(str(used.target)) for used in read]
    if node.op == "call_module":
        names += state_of_call(capture, node)
    state = {name: capture.state[name] for name in names if name in capture.state}
    trained = {name for name, t in state.items() if isinstance(t, nn.Parameter) and t.requires_grad}
    return (
        {name: t.nbytes for name, t in state.items() if name in trained},
        {name: t.nbytes for name, t in state.items() if name not in trained},
    )
