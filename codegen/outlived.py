"""Variables that are deleted, so that memory is given back where the user's code gives it back.

A method's variables hold their values until it returns. Mostly the next line of the user's binds
the name anew, or a backward keeps the value anyway. Two cases are others:

- The parts of a `torch.cat` are as large as the result, and no backward of its own keeps them. What
  they are but views of goes with them.
- A module's forward has returned, but its lines are not a method of their own, as where a cut
  divides it: its variables would live on with those of the class around it, or until another
  module's lines bind them anew. So would those for which a stage has two names, where the user's
  code binds one anew.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import fx

from fxpipe.codegen.names import tuple_of
from fxpipe.codegen.scope import Scope
from fxpipe.ir import Capture, Profile
from fxpipe.ops.interpret import MODE
from fxpipe.ops.source import calls_around
from fxpipe.ops.variables import GIVEN_UP, JOINS, bound_until, frames

# What is smaller than this part of the largest value is left, for fewer lines.
_LEAST = 0.01


def mark(capture: Capture, profile: Profile) -> None:
    """Name in the meta of each op the storage of its result, if no backward keeps it."""
    kept = {storage for cost in profile.costs.values() for storage, _ in cost.saved}
    sizes = {**capture.sizes, "batch": capture.batch}
    known = {name: spec for name, spec in capture.specs.items() if name in capture.ops}
    n_bytes = {name: spec.bytes(sizes) for name, spec in known.items()}
    largest = max(n_bytes.values(), default=0)
    for node in capture.graph.nodes:
        if n_bytes.get(node.name, 0) > _LEAST * largest:
            storage = capture.ops[node.name].storage
            node.meta[GIVEN_UP] = None if storage in kept else storage


def outlived(scope: Scope, names: Mapping[str, str]) -> dict[fx.Node, list[fx.Node]]:
    """By op: the values whose variables would hold memory behind it for nobody.

    No value of the same memory is read any more, and no later line binds the variable anew, of the
    same call or of one around it.
    """
    place = {node: k for k, node in enumerate(scope.nodes)}
    calls, ends = frames(scope.nodes)
    over, others = _over(place, calls, ends), _others(scope)
    bound: dict[str, list[int]] = defaultdict(list)
    for node, k in place.items():
        if node.name in names:
            whole = tuple_of(node)  # whose line has the names of all its items
            bound[names[node.name]].append(k if whole is None else place.get(whole, k))
    found: dict[fx.Node, list[fx.Node]] = {}
    for value in scope.nodes:
        storage = value.meta.get(GIVEN_UP)
        if storage is None or storage in others or value.name not in names:
            continue
        last = scope.nodes[over[storage]]
        anew = min((k for k in bound[names[value.name]] if k > place[value]), default=None)
        holds = anew is None or (anew > over[storage] and calls[anew] not in _around(value))
        if holds and last is not scope.nodes[-1] and value.meta.get(MODE) == last.meta.get(MODE):
            found.setdefault(last, []).append(value)
    return found


def _around(value: fx.Node) -> set[str]:
    """The calls whose lines a value's may bind, as `frames` names them."""
    return {"", *(key for _, key in calls_around(value))}


def _over(
    place: Mapping[fx.Node, int], calls: Sequence[str], ends: Mapping[str, int]
) -> dict[str, int]:
    """By storage: where it is read last, or its variable in the user's code holds it no more."""
    over: dict[str, int] = {}
    bound = bound_until([*place], calls, ends)
    joined: set[fx.Node] = set()  # the last reader joins it, or what is but a view of it
    for value, k in reversed(list(place.items())):
        readers = [user for user in value.users if user in place]
        last = max((place[user] for user in readers), default=k)
        storage = value.meta.get(GIVEN_UP)
        if any(
            user.target in JOINS or (user in joined and user.meta.get(GIVEN_UP) == storage)
            for user in readers
            if place[user] == last
        ):
            joined.add(value)
        until = last if value in joined else max(last, bound.get(value.name, ends[calls[k]]))
        if storage is not None:
            over[storage] = max(until, over.get(storage, until))
    return over


def _others(scope: Scope) -> set[object]:
    """The storages that others hold: who gave them to the method, and who takes its results."""
    crossing = {*scope.inputs, *scope.outputs}
    values = {used for node in scope.nodes for used in (node, *node.all_input_nodes)}
    return {value.meta.get(GIVEN_UP) for value in values if value.name in crossing}
