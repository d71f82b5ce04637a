"""Parts of the graph, each the ops of one call of a module, compared by structure.

Two parts have the same key if they differ in nothing but numbers and in which values they are
given. Those places are the part's slots.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from fxpipe.codegen.loops import Loop
from fxpipe.codegen.made import Made
from fxpipe.ops.local_sizes import LocalSizes
from fxpipe.ops.regions import Region
from fxpipe.runtime.manifest import TensorSpec

Substitute = Callable[["Slot"], Any]


@dataclass(frozen=True, slots=True)
class Slot:
    """A number, or a value from outside, that a part uses, and where.

    `module` is the path of the module that takes the number, from the part's on; `name` what the
    number is called there, as far as known; `within` whether it stands in `forward` rather than in
    a constructor; `node` the op that reads it, `place` the place among its arguments.
    """

    content: Any
    module: str
    name: str
    within: bool
    node: fx.Node | None = None
    place: int = 0

    @property
    def is_value(self) -> bool:
        """Whether it is a value from outside, or several in a list."""
        one = self.content[0] if isinstance(self.content, tuple) else self.content
        return isinstance(one, fx.Node)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the model: its state and values, and how each called module is made."""

    tree: Mapping[str, nn.Module]
    state: Mapping[str, Tensor]
    saved: frozenset[str]
    literals: Mapping[str, str]
    specs: Mapping[str, TensorSpec]
    made: Mapping[str, Made]


@dataclass(slots=True)
class Part:
    """Ops of one call of the module at `path`; `outputs` are those whose values others read.

    `call` is a key that no other call has; `mode` and `region` are those of the whole call, None if
    its ops differ in them. `sizes` are those that the values from outside tell.
    """

    path: str
    call: str
    nodes: Sequence[fx.Node]
    outputs: frozenset[int]
    mode: bool | None
    region: Region | None
    sizes: LocalSizes = field(default_factory=lambda: LocalSizes({}))
    key: tuple[Any, ...] = ()
    slots: list[Slot] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OpenedOp:
    """One op of a part with its slots filled."""

    node: fx.Node
    target: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True, slots=True)
class Opened:
    """A part with its slots filled.

    Modules and tensors are named from the part's module on. `texts` are those of the sizes that
    its ops read, as they were.
    """

    ops: Sequence[OpenedOp]
    made: Mapping[str, Made]
    loops: Mapping[fx.Node, Loop]
    tensors: Sequence[str]
    shapes: Mapping[str, tuple[Any, ...]]
    texts: Sequence[str]
    key: tuple[Any, ...]


class OutsideError(Exception):
    """The part calls a module or reads a tensor in a way that no class of its own could."""
