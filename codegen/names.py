"""Names in a stage file: local variables that read like the user's, paths to modules and state."""

import builtins
import keyword
import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, count

from torch import fx, nn

from fxpipe.codegen.functions import function_called
from fxpipe.ops.interpret import NAMED
from fxpipe.ops.specs import SIZES

_IMPORTED = {"torch", "nn", "F", "Tensor", "math", "operator", "checkpoint"}
_OURS = {"self", "dtype", "device", *_IMPORTED, *SIZES}
_MODULES_OWN = frozenset(dir(nn.Module()))
_TAKEN = {"_", *dir(builtins), *keyword.kwlist, *_OURS}

CALLED = "called"  # key of a node's meta: the variable that the user's line assigns its value to


def local_names(
    ops: Sequence[fx.Node],
    inputs: Sequence[str],
    outputs: Collection[str],
    called: Mapping[str, str],
    throughout: Mapping[str, Collection[str]],
    crossing: Mapping[str, str],
) -> dict[str, str]:
    """A variable for each value of a stage, by value.

    `called` are those with a name of their own, `throughout` those that loops read in each round,
    `crossing` the names of what goes between stages.
    The graph numbers its values (`x_3`, `x_4`); a person writes `x` again and again. A number is
    kept only where the unnumbered name still holds a value that is read later. So memory is given
    back as early as in the user's own code; what is the beginning of a longer expression has the
    variable that the user's line assigns, if that is free.
    """
    last_use = last_uses(ops, outputs, throughout)
    begun = _begun(ops)
    made_at = [*((-1, name) for name in inputs), *((k, node.name) for k, node in enumerate(ops))]
    kept = {crossing[v]: (k, v) for k, v in made_at if v in outputs and v in crossing}
    functions = {function_called(node) for node in ops}
    taken_until: dict[str, int] = {}
    chosen: dict[str, str] = {}

    def holds(variable: str, place: int, value: str) -> bool:
        waits, owner = kept.get(variable, (0, value))
        until = last_use.get(value, place + 1)
        return taken_until.get(variable, -1) <= place and (owner == value or until <= waits)

    for place, value in made_at:
        onto = base_name(begun[value]) if value in begun else None
        if onto is not None and onto not in functions and holds(onto, place, value):
            chosen[value] = onto
            taken_until[onto] = last_use[value]
            continue
        base = base_name(called.get(value, value))
        base = f"{base}_" if base in functions else base
        numbered = (f"{base}_{number}" for number in count(2))
        wished = chain((crossing.get(value, base), base), numbered)
        chosen[value] = next(name for name in wished if holds(name, place, value))
        taken_until[chosen[value]] = last_use.get(value, place + 1)
    return chosen


def last_uses(
    ops: Sequence[fx.Node], outputs: Iterable[str], throughout: Mapping[str, Collection[str]]
) -> dict[str, int]:
    """By value: up to which place in `ops` its variable is needed, or behind the last."""
    last_use: dict[str, int] = dict.fromkeys(outputs, len(ops))
    for place, node in enumerate(ops):
        for used in node.all_input_nodes:
            last_use[used.name] = max(place, last_use.get(used.name, 0))
    for node in ops:  # what is unpacked at once needs as many names
        if (source := tuple_of(node)) is not None:
            last_use[node.name] = max(last_use[source.name], last_use.get(node.name, 0))
    for place, node in enumerate(ops):
        for value in throughout.get(node.name, ()):
            made = last_use[node.name] if _is_tuple(node) else place
            last_use[value] = max(made + 1, last_use[value])
    return last_use


def tuple_of(node: fx.Node) -> fx.Node | None:
    """What makes the tuple that `node` is an item of."""
    source = node.args[0] if node.target is operator.getitem else None
    return source if isinstance(source, fx.Node) and _is_tuple(source) else None


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), tuple | list)


def _begun(ops: Sequence[fx.Node]) -> dict[str, str]:
    """Values without a name that the next step of the user's line reads: the variable of that."""
    begun: dict[str, str] = {}
    here = set(ops)
    for node in reversed(ops):
        if node.meta.get(NAMED) != "word" or len(node.users) != 1:
            continue
        (user,) = node.users
        assigned = user.name if user.meta.get(NAMED) == "variable" else begun.get(user.name)
        on_its_line = user.meta.get("frames") == node.meta.get("frames") != ()
        if assigned and on_its_line and user in here and user.args[:1] == (node,):
            begun[node.name] = assigned
    return begun


def called_values(ops: Iterable[fx.Node]) -> dict[str, str]:
    """The variables that the user's lines assign to what modules of the package return.

    What an op takes apart and the user called alike, as a loop over it does, has numbers by place.
    """
    called: dict[str, str] = {}
    for node in ops:
        if CALLED in node.meta:
            called[node.name] = node.meta[CALLED]
        elif node.op != "call_module" and _is_tuple(node):
            items = [user for user in node.users if user.target is operator.getitem]
            times = Counter(base_name(item.name) for item in items)
            for item in items:
                base = base_name(item.name)
                if times[base] > 1:
                    called[item.name] = f"${base}_{item.args[1]}"
    return called


def base_name(value: str) -> str:
    """`hidden_states_12` as `hidden_states`; nn.Sequential's own `input_3` as `x`.

    `$x_1` is a name that is meant as it is. None is `_`, which stands for what nobody reads.
    """
    if value.startswith("$"):
        return f"{value[1:]}_" if value[1:] in _OURS else value[1:]
    base = re.sub(r"(_\d+)+$", "", value)
    base = "x" if base == "input" else base
    base = f"_{base.lstrip('_')}" if base.startswith("__") else base  # Python writes those anew
    base = "value" if base in ("", "_") else base
    return f"{base}_" if base in _TAKEN else base


Containers = Mapping[str, str]  # paths of modules that are indexed: by "list" number or "dict" key


def is_free(variable: str) -> bool:
    """Whether a stage may call a variable so: an identifier that means nothing else there."""
    return variable.isidentifier() and variable not in _TAKEN


def child(parent: str, name: str, kind: str = "") -> str:
    """The expression for the child `name` of the module that the expression `parent` is."""
    if kind == "list":
        return f"{parent}[{name}]"
    if kind == "dict":
        return f'{parent}["{name}"]'
    if name in _MODULES_OWN:
        return f"{parent}._modules[{name!r}]"  # as an attribute it is the method
    return f"{parent}.{name}" if is_attribute(name) else f"getattr({parent}, {name!r})"


def is_attribute(name: str) -> bool:
    """Whether `name`, behind a dot in a class, is an attribute of just that name.

    Python writes identifiers in one normal form, and those of a class with two underscores anew.
    """
    plain = name.isidentifier() and not keyword.iskeyword(name)
    private = name.startswith("__") and not name.endswith("__")
    return plain and not private and unicodedata.normalize("NFKC", name) == name


def assignment(parent: str, name: str, value: str, kind: str = "") -> str:
    """The line that makes `value` the child `name` of `parent`."""
    target = child(parent, name, kind)
    if target.startswith("getattr("):
        return f"setattr({parent}, {name!r}, {value})"
    return f"{target} = {value}"


def path(name: str, containers: Containers, known: tuple[str, str] = ("", "self")) -> str:
    """The expression for a dotted path.

    `known` is a path that `name` lies below and the variable that holds that module.
    """
    walked, expression = known
    below = name.removeprefix(walked).removeprefix(".")
    for part in below.split("."):
        expression = child(expression, part, containers.get(walked, ""))
        walked = f"{walked}.{part}" if walked else part
    return expression


def plain(text: str) -> str:
    """Text of the model's that can't end a comment or a docstring."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return printable.replace('"""', "'''").replace("\\", "/")
