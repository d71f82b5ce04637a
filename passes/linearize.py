"""Linearization: the graph as a chain of blocks, and what crosses each place between them.

A block is what no cut may divide: a value that is written in place and all that touches it before,
a tuple and those who unpack it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import networkx as nx
from torch import Tensor, fx, nn

from fxpipe.errors import CaptureError
from fxpipe.ir import Block, Capture, Chain, OpCost, Profile, Value, own_storage
from fxpipe.ops.interpret import DTYPE, HUNK, limit
from fxpipe.ops.liveness import Needed, workspaces


def linearize(capture: Capture, profile: Profile) -> Chain:
    """The blocks of ops with their costs, and the values that go between them."""
    return _chain(capture, profile, blocks_of(capture))


def blocks_of(capture: Capture) -> list[list[str]]:
    """Ops grouped into blocks, ordered as near to the program as their needs allow.

    Raises CaptureError if the model has no ops to place.
    """
    if not capture.ops:
        raise CaptureError(f"{capture.model_name}.forward computes nothing that could be pipelined")
    groups = [sorted(group) for group in _inseparable(capture).to_sets()]
    place = {name: k for k, name in enumerate(capture.ops)}
    return _ordered(_needs(capture), groups, place)


def _needs(capture: Capture) -> "nx.DiGraph[str]":
    """Ops as nodes, with an edge where one must come before another.

    Edges are values, the order of reads and writes of one storage, and of random numbers.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(capture.ops)
    for node in _nodes(capture):
        for used in node.all_input_nodes:
            if used.name in capture.ops:
                graph.add_edge(used.name, node.name)
    for touching in _touching(capture).values():
        for earlier, later in pairwise(touching):
            graph.add_edge(earlier, later)
    random = [name for name, op in capture.ops.items() if op.random]
    graph.add_edges_from(pairwise(random))
    return graph


def _nodes(capture: Capture) -> list[fx.Node]:
    return [node for node in capture.graph.nodes if node.name in capture.ops]


def _touching(capture: Capture) -> dict[str, list[str]]:
    """For each storage that some op writes: the ops that read or write it, in program order."""
    written = {storage for op in capture.ops.values() for storage in op.mutates}
    touching: dict[str, list[str]] = {storage: [] for storage in written}
    for node in _nodes(capture):
        op = capture.ops[node.name]
        storages = {op.storage, *op.mutates, *(_storage(capture, n) for n in node.all_input_nodes)}
        if node.op == "call_module":
            storages.update(map(own_storage, _state_of_call(capture, node)))
        for storage in storages & written:
            touching[storage].append(node.name)
    return touching


def _storage(capture: Capture, node: fx.Node) -> str:
    if node.op == "get_attr":
        return own_storage(capture.first_name(str(node.target)))
    return capture.ops[node.name].storage if node.name in capture.ops else node.name


def _state_of_call(capture: Capture, node: fx.Node) -> Iterable[str]:
    """First names of the parameters and buffers of the module that `node` calls."""
    module = capture.modules[str(node.target)]
    for name in [*dict(module.named_parameters()), *dict(module.named_buffers())]:
        yield capture.first_name(f"{node.target}.{name}")


def _inseparable(capture: Capture) -> "nx.utils.UnionFind[str]":
    together: nx.utils.UnionFind[str] = nx.utils.UnionFind(capture.ops)
    for node in _nodes(capture):
        if not isinstance(node.meta.get("val"), Tensor):
            together.union(node.name, *(u.name for u in node.users if u.name in capture.ops))
    for storage, touching in _touching(capture).items():
        if storage in capture.ops:  # once written for the last time, anyone may read it
            writes = [k for k, name in enumerate(touching) if storage in capture.ops[name].mutates]
            touching = touching[: writes[-1] + 1]
        together.union(*touching)
    for maker, reader in _made_of_nothing(capture):
        together.union(maker, reader)
    for asker, reader in _without_dtype(capture):
        together.union(asker, reader)
    hunks: dict[int, list[str]] = {}
    for node in _nodes(capture):
        if HUNK in node.meta:
            hunks.setdefault(node.meta[HUNK], []).append(node.name)
    for names in hunks.values():
        together.union(*names)
    return together


def _made_of_nothing(capture: Capture) -> Iterable[tuple[str, str]]:
    """Ops such as `torch.zeros` that read no value, each with its first reader.

    There is no use in sending on what the reader's stage can make by itself.
    """
    written = {storage for op in capture.ops.values() for storage in op.mutates}
    for node in _nodes(capture):
        op = capture.ops[node.name]
        reads = [used for used in node.all_input_nodes if used.name not in capture.literals]
        readers = [user for user in node.users if user.name in capture.ops]
        if readers and not reads and not op.random and op.storage not in written:
            yield node.name, min(readers).name


def _without_dtype(capture: Capture) -> Iterable[tuple[str, str]]:
    """Ops that ask for the model's dtype but read nothing that has it, each with its first reader.

    So every stage that asks holds a parameter or takes a value that tells.
    """
    unknown: set[str] = set()
    fixed = capture.fixed
    for node in _nodes(capture):
        reads = [used for used in node.all_input_nodes if used.name not in unknown]
        asked = any(used.target in (DTYPE, limit) for used in reads)
        asks = asked or len(reads) < len(node.all_input_nodes)
        values = [used.meta.get("val") for used in reads if used.name not in fixed]
        tells = any(isinstance(value, Tensor) and value.dtype == capture.dtype for value in values)
        readers = [user for user in node.users if user.name in capture.ops]
        if asks and not tells and node.op != "call_module":
            unknown.add(node.name)
            if readers:
                yield node.name, min(readers).name


def _ordered(
    needs: "nx.DiGraph[str]", groups: Sequence[Sequence[str]], place: Mapping[str, int]
) -> list[list[str]]:
    """Groups in an order that respects all needs; those that need each other become one."""
    group_of = {name: k for k, group in enumerate(groups) for name in group}
    between: nx.DiGraph[int] = nx.DiGraph()
    between.add_nodes_from(range(len(groups)))
    between.add_edges_from((group_of[a], group_of[b]) for a, b in needs.edges)
    merged: nx.DiGraph[int] = nx.condensation(between)
    merged.remove_edges_from(list(nx.selfloop_edges(merged)))
    blocks = {
        k: sorted((name for g in members for name in groups[int(g)]), key=place.__getitem__)
        for k, members in merged.nodes(data="members")
    }
    order = nx.lexicographical_topological_sort(merged, key=lambda k: place[blocks[k][0]])
    return [blocks[k] for k in order]


def _chain(capture: Capture, profile: Profile, blocks: Sequence[Sequence[str]]) -> Chain:
    nodes = {node.name: node for node in capture.graph.nodes}
    block_of = {name: k for k, block in enumerate(blocks) for name in block}
    block_of.update((given.name, -1) for given in capture.inputs)
    readers: dict[str, set[int]] = {}
    for name, k in block_of.items():
        for used in nodes[name].all_input_nodes:
            readers.setdefault(used.name, set()).add(k)
    for name in capture.outputs:
        readers.setdefault(name, set()).add(len(blocks))
    values = []
    for name, producer in block_of.items():
        consumers = tuple(sorted(readers.get(name, set()) - {producer}))
        if consumers and name in capture.specs:
            spec = capture.specs[name]
            n_bytes = spec.bytes({**capture.sizes, "batch": profile.batch})
            values.append(Value(name, n_bytes, producer, consumers, spec.requires_grad))
    order = [name for block in blocks for name in block]
    loss = profile.loss
    needed, loss_bytes = workspaces(
        capture, profile.costs, order, profile.batch, loss.peak_bytes if loss else None
    )
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
    )


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
    halves = []
    backward_bytes = 0
    states = [_state(capture, node) for node in nodes]
    readers = Counter(name for weights, _ in states for name in weights)
    for node, cost, (weights, others) in zip(nodes, costs, states, strict=True):
        alone = sum(size for name, size in weights.items() if readers[name] == 1)
        added = min(cost.added_bytes, alone)
        backward_bytes = max(backward_bytes, needed[node.name].backward_bytes - added)
        halves.append(_halves(cost, needed[node.name], sum(weights.values()), added))
        parameters |= weights
        trained |= {name: n for name, n in weights.items() if name not in cost.shapes_of}
        buffers |= others
    written = {storage for node in nodes for storage in capture.ops[node.name].mutates}
    own = [needed[node.name] for node in nodes]
    return Block(
        ops=tuple(node.name for node in nodes),
        forward_ms=sum(cost.forward_ms for cost in costs),
        backward_ms=sum(cost.backward_ms for cost in costs),
        saved=tuple({name: size for cost in costs for name, size in cost.saved}.items()),
        parameters=tuple(parameters.items()),
        buffers=tuple(buffers.items()),
        forward_workspace_bytes=max(op.forward_bytes for op in own),
        backward_workspace_bytes=backward_bytes,
        weight_gradient_ms=sum(cost.weight_gradient_ms for cost in costs),
        arriving_bytes=sum(
            max(0, cost.arriving_bytes - returned.get(node.name, 0))
            for node, cost in zip(nodes, costs, strict=True)
        ),
        halving_ms=sum(cost.halving_ms for cost in costs),
        written_bytes=sum(size for name, size in buffers.items() if own_storage(name) in written),
        input_workspace_bytes=max(of_inputs for of_inputs, _ in halves),
        weight_workspace_bytes=max(of_weights for _, of_weights in halves),
        # What only some of the ops find there may not be what is there at the fullest.
        waiting=frozenset.intersection(*(op.waiting for op in own)),
        returning=frozenset.intersection(*(op.returning for op in own)),
        trained=tuple(trained.items()),
    )


def _state(capture: Capture, node: fx.Node) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of what the op reads of the model: parameters that are trained, and the rest.

    A frozen parameter has no gradient and no optimizer's state: it is held as a buffer is.
    """
    read = [used for used in node.all_input_nodes if used.op == "get_attr"]
    names = [capture.first_name(str(used.target)) for used in read]
    if node.op == "call_module":
        names += _state_of_call(capture, node)
    state = {name: capture.state[name] for name in names if name in capture.state}
    trained = {name for name, t in state.items() if isinstance(t, nn.Parameter) and t.requires_grad}
    return (
        {name: t.nbytes for name, t in state.items() if name in trained},
        {name: t.nbytes for name, t in state.items() if name not in trained},
    )


def _halves(cost: OpCost, needed: Needed, weight_bytes: int, added: int) -> tuple[int, int]:
    """What an op needs in the first half of a backward and in the second.

    In the second no gradients are on their way; those of weights are as large as these, but for
    what is `added` to what is there.
    """
    backward = needed.backward_bytes
    if cost.arriving_bytes:
        return backward - weight_bytes, cost.backward_bytes - added
    return (0, backward) if cost.weight_gradient_ms else (backward, 0)
