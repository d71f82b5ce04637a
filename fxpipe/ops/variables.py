"""How long the variables of the user's lines hold what is assigned to them.

A variable of a function is there until the function ends, or until a later line assigns to it
anew; a stage's code is the user's, so its variables are too. Where it is not, a stage deletes them
(codegen/outlived.py).
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fxpipe.ir import Capture
from fxpipe.ops.interpret import NAMED
from fxpipe.ops.source import calls_around

# Behind the line of one of these, a stage deletes what was joined, if it is read no more.
JOINS = {
    *(torch.cat, torch.concat, torch.concatenate, torch.stack),
    *(torch.hstack, torch.vstack, torch.dstack),
}

# The key of a node's meta with the storage of its result, if no backward keeps that.
GIVEN_UP = "given up"


def held_until(capture: Capture, order: Sequence[str]) -> dict[str, int]:
    """By value: the last place in `order` at which its variable still holds it.

    What is part of a longer expression has no variable, and is left out, unless it is joined to
    others: a stage may give it a line of its own. It is deleted behind the line that joins them,
    which is taken to end with what reads the whole. What another line reads, as that of a function
    which it is passed to, has a line and a variable in a stage.
    """
    nodes = {node.name: node for node in capture.graph.nodes}
    place = {name: k for k, name in enumerate(order)}
    calls, ends = frames([nodes[name] for name in order])
    until = bound_until([nodes[name] for name in order], calls, ends)
    held: dict[str, int] = {}
    for name in order:
        readers = [user for user in nodes[name].users if user.name in place]
        last = max((place[user.name] for user in readers), default=place[name])
        if any(user.target in JOINS and place[user.name] == last for user in readers):
            held[name] = _read_until(nodes, order, calls, last)
        elif name in until:
            held[name] = until[name]
    return held


def bound_until(
    nodes: Sequence[fx.Node], calls: Sequence[str], ends: Mapping[str, int]
) -> dict[str, int]:
    """By value that has a variable: its last place, or where the user's code binds that anew.

    If not before the call ends whose line it is; `calls` and `ends` are those of `frames`.
    """
    place = {node.name: k for k, node in enumerate(nodes)}
    kept = [node for node in nodes if _has_variable(node, place)]
    assigned: dict[tuple[str, str], list[int]] = defaultdict(list)
    for node in kept:
        assigned[calls[place[node.name]], base(node.name)].append(place[node.name])
    until: dict[str, int] = {}
    for node in kept:
        k = place[node.name]
        last = max((place[user.name] for user in node.users if user.name in place), default=k)
        places = assigned[calls[k], base(node.name)]
        anew = bisect_left(places, max(last, k + 1))
        until[node.name] = places[anew] if anew < len(places) else ends[calls[k]]
    return until


def _has_variable(node: fx.Node, place: Mapping[str, int]) -> bool:
    """Whether a stage has a variable for a value: the user's, or one of its own."""
    if node.meta.get(NAMED) == "variable" or len(node.users) != 1:
        return True
    (user,) = node.users
    line = node.meta.get("frames")  # none of torch's own modules, whose lines may be broken
    on_its_line = bool(line) and user.meta.get("frames") == line
    follows = place.get(user.name) == place[node.name] + 1 or user.args[:1] == (node,)
    return not (on_its_line and follows)


def base(name: str) -> str:
    """A name without the numbers that tell it from others."""
    return re.sub(r"(_\d+)+$", "", name)


def frames(nodes: Sequence[fx.Node]) -> tuple[list[str], dict[str, int]]:
    """For each op the module's call whose line it is, and for each call its last place."""
    calls: list[str] = []
    ends: dict[str, int] = {}
    for k, node in enumerate(nodes):
        keys = ["", *(key for _, key in calls_around(node))]
        calls.append(keys[-1])
        ends.update(dict.fromkeys(keys, k))
    return calls, ends


def _read_until(
    nodes: Mapping[str, fx.Node], order: Sequence[str], calls: Sequence[str], k: int
) -> int:
    """The last place of the op or the call that reads what place `k` makes, if on the same line."""
    line = nodes[order[k]].meta.get("frames", ())

    def on_line(place: int) -> bool:
        there = nodes[order[place]].meta.get("frames", ()) if place < len(order) else ()
        return bool(line) and there[: len(line)] == line

    end = k
    while on_line(end + 1) and calls[end + 1] != calls[k]:
        end += 1
    return k + 1 if end == k and on_line(k + 1) else end
