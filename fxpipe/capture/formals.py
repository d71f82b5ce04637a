"""Which parameter of a module's forward each value is given as, in each call of the module.

What a forward calls its arguments is not in a graph, nor can it be told from the text of a call.
But Dynamo binds them as it traces the call. Private to torch: tests/test_private.py.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from torch import fx
from torch._dynamo.symbolic_convert import InliningInstructionTranslator

FORMALS = "formals"  # the key of a node's meta
_CUSTOM = "custom"  # that of what torch, which copies graphs, keeps of others'

# By the key of a call in `nn_module_stack`, what forward calls the value; `*xs` of one in a list.
Formals = Mapping[str, tuple[str, ...]]


@contextmanager
def noted_formals() -> Iterator[None]:
    """Meanwhile each node that Dynamo makes notes what the forwards call it that are given it."""
    inline = InliningInstructionTranslator.inline_call_

    @wraps(inline)
    def inlining(self: Any) -> Any:
        given = {name: _held(self, value) for name, value in self.symbolic_locals.items()}
        result = inline(self)  # only what is read becomes a node
        _note(self, given)
        return result

    with patch.object(InliningInstructionTranslator, "inline_call_", inlining):
        yield


def formals_of(node: fx.Node) -> Formals:
    """What is noted of a node of Dynamo's."""
    found: Formals = node.meta.get(_CUSTOM, {}).get(FORMALS, {})
    return found


def hand_on(formals: Formals, node: fx.Node) -> None:
    """Let `node` of our graph be called so, too."""
    known: Formals = node.meta.get(FORMALS, {})
    if formals:
        node.meta[FORMALS] = {
            call: tuple(dict.fromkeys((*known.get(call, ()), *formals.get(call, ()))))
            for call in {**known, **formals}
        }


def _note(tracer: Any, given: Mapping[str, Any]) -> None:
    """Note what `tracer`, if it traced the forward of a module, was given."""
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    call = next(reversed(tracer.nn_module_stack), "")
    owner = _known(given.get(next(iter(tracer.f_code.co_varnames), "")))
    if not isinstance(owner, UnspecializedNNModuleVariable):
        return
    module: Any = owner.value
    if call.partition("@")[0] != str(id(module)):
        return
    if tracer.f_code is not getattr(inspect.unwrap(type(module).forward), "__code__", None):
        return
    for name, variable in given.items():
        for one, called in ((variable, name), *((item, f"*{name}") for item in _items(variable))):
            node = _node(one)
            if node is not None:
                known = node.meta.setdefault(_CUSTOM, {}).setdefault(FORMALS, {})
                known[call] = tuple(dict.fromkeys((*known.get(call, ()), called)))


def _held(tracer: Any, variable: Any) -> Any:
    """What an argument is; one that an inner function reads, a comprehension too, is in a cell."""
    from torch._dynamo.variables import CellVariable

    side_effects = tracer.output.side_effects
    if not isinstance(_known(variable), CellVariable):
        return variable
    if not side_effects.has_pending_mutation_of_attr(variable, "cell_contents"):
        return variable  # a variable that nothing is assigned to yet
    # As `load_cell`, which looks whether the variable is deleted: a text would be written then.
    return side_effects.load_attr(variable, "cell_contents", deleted_ok=True, check=False)


def _items(variable: Any) -> Iterator[Any]:
    """Those of a list or a tuple."""
    from torch._dynamo.variables.lists import BaseListVariable

    known = _known(variable)
    yield from known.items if isinstance(known, BaseListVariable) else ()


def _node(variable: Any) -> fx.Node | None:
    """The node of a tensor."""
    from torch._dynamo.variables.tensor import TensorVariable

    known = _known(variable)
    if not isinstance(known, TensorVariable):
        return None
    node: fx.Node = known.as_proxy().node
    return node


def _known(variable: Any) -> Any:
    """What Dynamo has found a variable to be; None if it has not looked, as nothing has."""
    from torch._dynamo.variables.lazy import LazyVariableTracker

    if not isinstance(variable, LazyVariableTracker):
        return variable
    return variable.realize() if variable.is_realized() else None
