"""The tree of module calls that a stage's ops came from."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from fxpipe.ops.interpret import MODE
from fxpipe.ops.regions import PLAIN, REGION, Region
from fxpipe.ops.source import calling_line, calls_around

SEGMENT = "segment"  # the key of a node's meta that holds the number of its segment in its stage


@dataclass(slots=True, eq=False)
class Call:
    """One call of the module at `path`: its ops and the calls within it, in order.

    `stack` has the path and the key of each call that it is within in the model, and its own at the
    end.
    """

    stack: tuple[tuple[str, str], ...]
    stage: int
    items: list["fx.Node | Call"] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The module's place in the model."""
        return self.stack[-1][0] if self.stack else ""

    @property
    def height(self) -> int:
        """How many calls are nested within it."""
        return max((1 + item.height for item in self.items if isinstance(item, Call)), default=0)

    def calls(self) -> Iterator["Call"]:
        """All calls within it, those within them first."""
        for item in self.items:
            if isinstance(item, Call):
                yield from item.calls()
                yield item

    def nodes(self) -> list[fx.Node]:
        """Its ops, those of the calls within it included."""
        found: list[fx.Node] = []
        for item in self.items:
            found += item.nodes() if isinstance(item, Call) else [item]
        return found

    def replace(self, call: "Call", items: Sequence[fx.Node]) -> None:
        """Put `items` where `call` stands."""
        place = self.items.index(call)
        self.items[place : place + 1] = items

    def mode(self) -> bool | None:
        """The one mode that all its ops are of, if it is so."""
        modes = {node.meta.get(MODE) for node in self.nodes()}
        return modes.pop() if len(modes) == 1 else None

    def region(self) -> Region | None:
        """The one region of grad mode and autocast that all its ops are in, if it is so."""
        regions = {node.meta.get(REGION, PLAIN) for node in self.nodes()}
        return regions.pop() if len(regions) == 1 else None


def call_tree(ops: Sequence[fx.Node], stage: int, totals: Mapping[str, int]) -> Call:
    """The calls that `ops` came from; `totals` has the number of ops of each call in the model.

    A call of which the stage has not all ops, or not in one run, or not all in one segment, is not
    in the tree: its ops and the calls within it stand in the call around it.
    """
    runs: dict[str, int] = {}
    counts: dict[str, int] = {}
    before: set[str] = set()
    segments: dict[str, set[object]] = {}
    for node in ops:
        keys = {key for _, key in calls_around(node)}
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
            segments.setdefault(key, set()).add(node.meta.get(SEGMENT))
            runs[key] = runs.get(key, 0) + (key not in before)
        before = keys
    whole = {
        key
        for key, count in counts.items()
        if count == totals[key] and runs[key] == 1 and len(segments[key]) == 1
    }
    root = Call((), stage)
    open_calls = [root]
    for node in ops:
        outer = calls_around(node)
        stack = tuple(entry for entry in outer if entry[1] in whole)
        shared = 0
        while (
            shared < min(len(stack), len(open_calls) - 1)
            and open_calls[shared + 1].stack[-1] == stack[shared]
        ):
            shared += 1
        del open_calls[shared + 1 :]
        for depth in range(shared, len(stack)):
            inner = Call(outer[: outer.index(stack[depth]) + 1], stage)
            open_calls[-1].items.append(inner)
            open_calls.append(inner)
        open_calls[-1].items.append(node)
    return root


def op_counts(ops: Iterable[fx.Node]) -> dict[str, int]:
    """The number of ops of each call."""
    counts: dict[str, int] = {}
    for node in ops:
        for _, key in calls_around(node):
            counts[key] = counts.get(key, 0) + 1
    return counts


def home(node: fx.Node) -> str:
    """The path of the module whose forward has the line of `node`."""
    stack = calls_around(node)
    return stack[-1][0] if stack else ""


def call_meta(call: Call, tree: Mapping[str, nn.Module]) -> dict[str, Any]:
    """What a node that stands for all ops of a call has as meta; `tree` are the model's modules."""
    first = call.nodes()[0]
    outer = call.stack[-2][0] if len(call.stack) > 1 else ""
    stack = first.meta.get("stack", ())[len(call.stack) - 1 :] or call.stack[-1:]
    line = calling_line(first, tree[outer], [tree[path] for path, _ in stack])
    frames = first.meta.get("frames", ())
    known = frames[: frames.index(line) + 1] if line in frames else ()
    meta = {"module": call.path, "stack": call.stack, "source": line, "frames": known}
    mode, region = call.mode(), call.region()
    meta |= {} if mode is None else {MODE: mode}
    meta |= {SEGMENT: first.meta[SEGMENT]} if SEGMENT in first.meta else {}
    return meta | ({} if region is None else {REGION: region})
