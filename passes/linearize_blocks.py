"""Blocks of ops, in an order that the program's needs allow.

A block is what no cut may divide: a value that is written in place and all that touches it before,
a tuple and those who unpack it.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import networkx as nx
from torch import Tensor, fx, nn

from fxpipe.errors import CaptureError
from fxpipe.ir import Capture, own_storage
from fxpipe.ops.interpret import DTYPE, HUNK, limit


def blocks_of(capture: Capture) -> list[list[str]]:
    """Ops grouped into blocks, ordered as near to the program as their needs allow.

    Raises CaptureError if the model has no ops to place.
    """
    if not capture.ops:
        raise CaptureError(f"{capture.model_name}.forward computes nothing that could be pipelined")
    groups = [sorted(group) for group in _inseparable(capture).to_sets()]
    place = {name: k for k, name in enumerate(capture.ops)}
    return _ordered(_needs(capture), groups, place)


def state_of_call(capture: Capture, node: fx.Node) -> Iterable[str]:
    """First names of the parameters and buffers of the module that `node` calls."""
    module = capture.modules[str(node.target)]
    for name in [*dict(module.named_parameters()), *dict(module.named_buffers())]:
        yield capture.first_name(f"{node.target}.{name}")


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
        read = (name for used in node.all_input_nodes for name in capture.memories(used))
        storages = {*op.memories, *op.mutates, *read}
        if node.op == "call_module":
            storages.update(map(own_storage, state_of_call(capture, node)))
        for storage in storages & written:
            touching[storage].append(node.name)
    return touching


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
    """Ops that ask for the model's dtype, each with the next op, or else the last, that tells it.

    So every stage that asks holds a parameter: no other tensor has its dtype under autocast, and
    for inputs that were not moved to another as the model was.
    """
    nodes = _nodes(capture)
    telling = [place for place, node in enumerate(nodes) if _tells_dtype(capture, node)]
    for place, node in enumerate(nodes):
        read = (used for used in node.all_input_nodes if used.name in capture.literals)
        if telling and any(used.target in (DTYPE, limit) for used in read):
            yield node.name, nodes[next((k for k in telling if k >= place), telling[-1])].name


def _tells_dtype(capture: Capture, node: fx.Node) -> bool:
    """Whether an op uses a parameter of the model's dtype."""
    used = [capture.state.get(str(used.target)) for used in node.all_input_nodes]
    if node.op == "call_module":
        used += capture.modules[str(node.target)].parameters()
    return any(isinstance(own, nn.Parameter) and own.dtype == capture.dtype for own in used)


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
