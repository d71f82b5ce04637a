"""The class of a group of parts: what is common to all is written into it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from fxpipe.codegen.arguments import Column, input_names, setting_names
from fxpipe.codegen.loops import LOOP, Loop
from fxpipe.codegen.made import Made, Written, dtypes_within, made_of_stock
from fxpipe.codegen.names import called_values
from fxpipe.codegen.opening import open_part
from fxpipe.codegen.own_dtype import DTYPE
from fxpipe.codegen.parts import Facts, Opened, Part, Slot
from fxpipe.codegen.scope import Scope
from fxpipe.ir import Capture
from fxpipe.ops.constants import same
from fxpipe.ops.interpret import MODE
from fxpipe.ops.regions import REGION
from fxpipe.ops.specs import sizes_in, where_told
from fxpipe.ops.variables import GIVEN_UP
from fxpipe.runtime.manifest import Mode, TensorSpec


@dataclass(frozen=True, slots=True)
class Block:
    """A repeated module as a class; `paths` are the modules that it stands for."""

    name: str
    kind: type[nn.Module]
    scope: Scope
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Design:
    """A class before it has a name: its scope, and for each part what it is given.

    `outputs` are places of ops in the parts.
    """

    scope: Scope
    settings: Sequence[Mapping[str, Any]]
    inputs: Sequence[tuple[Any, ...]]
    outputs: tuple[int, ...]


def varying(parts: Sequence[Part]) -> dict[Column, list[Slot]]:
    """The numbers that are not the same in all parts, and the first part's slots of each."""
    found: dict[Column, list[Slot]] = {}
    for column, slot in zip(_columns(parts), parts[0].slots, strict=True):
        if not slot.is_value and any(not same(value, column[0]) for value in column):
            found.setdefault(column, []).append(slot)
    return found


def design(
    parts: Sequence[Part],
    facts: Facts,
    capture: Capture,
    modules: Sequence[nn.Module],
) -> Design | None:
    """One class for `parts`, which have one key.

    None if it could not tell a size that it needs, or the model's dtype.
    """
    first, columns = parts[0], _columns(parts)
    opened = open_part(first, facts, lambda slot: slot.content)
    taken = {name.partition(".")[0] for name in (*opened.made, *opened.tensors)}
    settings = setting_names(varying(parts), taken, modules)
    inputs = input_names(parts, modules[0], capture.formals)
    common = _common_specs(parts, capture.specs)
    for column, name in inputs.items():
        if isinstance(column[0], tuple):
            continue  # a list has no one shape
        told = zip(parts, column, strict=True)
        spec = _common([_spec(part, value, capture.specs) for part, value in told])
        common |= {} if spec is None else {f"${name}": spec}
    given = [spec for name in inputs.values() if (spec := common.get(f"${name}")) is not None]
    for size in {size for text in opened.texts for size in sizes_in(text)}:
        if all(where_told(spec, size) is None for spec in given):
            return None
    state = {name: facts.state[f"{first.path}.{name}"] for name in opened.tensors}
    dtypes = {own.dtype for own in state.values() if isinstance(own, nn.Parameter)}
    dtypes.update(dtypes_within(opened.made.items()).values())
    if capture.dtype not in dtypes and any(DTYPE.search(text) for text in opened.texts):
        return None
    outputs = tuple(sorted(frozenset[int]().union(*(part.outputs for part in parts))))
    return Design(
        scope=_scope(
            parts,
            facts,
            columns,
            settings,
            inputs,
            outputs,
            common,
            _modes(parts, inputs, outputs, capture),
            capture.fixed,
        ),
        settings=[
            {name: column[k] for column, name in settings.items()} for k in range(len(parts))
        ],
        inputs=[tuple(column[k] for column in inputs) for k in range(len(parts))],
        outputs=outputs,
    )


def _modes(
    parts: Sequence[Part],
    inputs: Mapping[Column, str],
    outputs: Sequence[int],
    capture: Capture,
) -> dict[str, Mode]:
    """Inputs and outputs that one mode alone has, where it is not the whole call that it has."""
    values = {f"${name}": column for column, name in inputs.items()}
    for place in outputs:
        values[parts[0].nodes[place].name] = tuple(part.nodes[place] for part in parts)
    modes: dict[str, Mode] = {}
    for name, column in values.items():
        if isinstance(column[0], tuple):
            continue
        pairs = zip(column, parts, strict=True)
        found = {capture.mode(value.name) for value, part in pairs if part.mode is None}
        if found - {"both"}:
            modes[name] = min(found - {"both"})
    return modes


def _columns(parts: Sequence[Part]) -> list[Column]:
    """For each slot its contents in all parts."""
    return list(zip(*([slot.content for slot in part.slots] for part in parts), strict=True))


def _common(specs: Iterable[TensorSpec | None]) -> TensorSpec | None:
    """What is the same in all of `specs`; a size that differs is `_`."""
    first, *others = list(specs)
    if first is None or None in others:
        return None
    known = [spec for spec in others if spec is not None]
    if any(s.dtype != first.dtype or len(s.shape) != len(first.shape) for s in known):
        return None
    shape = tuple(
        dim if all(spec.shape[k] == dim for spec in known) else "_"
        for k, dim in enumerate(first.shape)
    )
    return TensorSpec(shape, first.dtype, first.requires_grad)


def _spec(part: Part, value: fx.Node, specs: Mapping[str, TensorSpec]) -> TensorSpec | None:
    """What a value is in the sizes that the part knows."""
    return part.sizes.spec(specs[value.name]) if value.name in specs else None


def _common_specs(parts: Sequence[Part], specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    found = {}
    for place, node in enumerate(parts[0].nodes):
        spec = _common([_spec(part, part.nodes[place], specs) for part in parts])
        if spec is not None:
            found[node.name] = spec
    return found


def _scope(
    parts: Sequence[Part],
    facts: Facts,
    columns: Sequence[Column],
    settings: Mapping[Column, str],
    inputs: Mapping[Column, str],
    outputs: Sequence[int],
    common: Mapping[str, TensorSpec],
    modes: Mapping[str, Mode],
    fixed: frozenset[str],
) -> Scope:
    """The ops of the first part in a graph of their own, with names in its slots."""
    graph = fx.Graph()
    formal = {column: graph.placeholder(name) for column, name in inputs.items()}
    for node, name in zip(formal.values(), inputs.values(), strict=True):
        node.name = f"${name}"  # unlike any value's
    for column, node in formal.items():
        if not isinstance(column[0], tuple):
            node.meta[GIVEN_UP] = column[0].meta.get(GIVEN_UP)
    waiting = iter(columns)

    def fill(slot: Slot) -> Any:
        column = next(waiting)
        if slot.is_value:
            return formal[column]
        if column not in settings:
            return slot.content
        return Written(f"self.{settings[column]}" if slot.within else settings[column])

    first = parts[0]
    opened = open_part(first, facts, fill)
    prefix = f"{first.path}."
    new: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, fx.Node] = {}

    def placed(value: Any) -> Any:
        if not isinstance(value, fx.Node) or value.graph is graph:
            return value
        if value in new:
            return new[value]
        name = str(value.target).removeprefix(prefix)
        if name not in attributes:
            attributes[name] = graph.get_attr(name)
            attributes[name].name = f"self.{name}"  # unlike any value's
        return attributes[name]

    made, loops = _needing(opened, parts, facts)
    for op in opened.ops:
        args, kwargs = fx.node.map_aggregate((op.args, op.kwargs), placed)
        node = graph.create_node(op.node.op, op.target, args, kwargs)
        node.name = op.node.name
        node.meta = dict(op.node.meta)
        if first.mode is not None:
            node.meta.pop(MODE, None)
        if first.region is not None:
            node.meta.pop(REGION, None)
        if op.node in loops:
            node.meta[LOOP] = loops[op.node]
        new[op.node] = node
    state = {name: facts.state[prefix + name] for name in opened.tensors}
    return Scope(
        path=first.path,
        nodes=tuple(new.values()),
        inputs=tuple(node.name for node in formal.values()),
        outputs=tuple(first.nodes[place].name for place in outputs),
        made=made,
        tree={},
        state=state,
        shapes=opened.shapes,
        saved=frozenset(name for name in state if prefix + name in facts.saved),
        literals={},
        texts=tuple(opened.texts),
        specs=common,
        modes=modes,
        lists=frozenset(
            f"${name}" for column, name in inputs.items() if isinstance(column[0], tuple)
        ),
        fixed=frozenset(
            f"${name}"
            for column, name in inputs.items()
            if not isinstance(column[0], tuple) and fixed & {value.name for value in column}
        ),
        settings={name: column[0] for column, name in settings.items()},
        called=called_values(new.values()),
    )


def _needing(
    opened: Opened, parts: Sequence[Part], facts: Facts
) -> tuple[dict[str, Made], dict[fx.Node, Loop]]:
    """The modules of a class, with the arguments that one of its instances needs."""
    made = {}
    for name, one in opened.made.items():
        paths = [f"{part.path}.{name}" for part in parts]
        called = [facts.made[path] for path in paths if path in facts.made]
        others = called or [made_of_stock(facts.tree[path]) for path in paths]
        made[name] = one.needing(others)
    loops = {}
    for node, loop in opened.loops.items():
        name = str(node.target).removeprefix(f"{parts[0].path}.")
        loops[node] = replace(loop, made=tuple(made[f"{name}.{number}"] for number in loop.numbers))
    return made, loops
