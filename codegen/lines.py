"""An op as the Python expression that a person would write for it."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from fxpipe.codegen.call_arguments import spread, told_arguments, without_defaults
from fxpipe.codegen.functions import function_called
from fxpipe.codegen.growing import new_list
from fxpipe.codegen.loops import CHECKPOINT
from fxpipe.codegen.made import Written
from fxpipe.codegen.segments import recomputed
from fxpipe.errors import CaptureError
from fxpipe.ops.interpret import MODE, by_mode, limit

_INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.matmul: "@",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
    operator.rshift: ">>",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
}
_INPLACE: dict[Any, str] = {
    operator.iadd: "+=",
    operator.isub: "-=",
    operator.imul: "*=",
    operator.itruediv: "/=",
    operator.ifloordiv: "//=",
    operator.imod: "%=",
    operator.ipow: "**=",
    operator.imatmul: "@=",
    operator.iand: "&=",
    operator.ior: "|=",
    operator.ixor: "^=",
}
_PREFIX: dict[Any, str] = {operator.neg: "-", operator.pos: "+", operator.invert: "~"}
_NAMESPACES: tuple[tuple[str, Any], ...] = (
    ("F", functional),
    ("torch", torch),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("torch.special", torch.special),
    ("torch.Tensor", Tensor),
    ("math", math),
    ("operator", operator),
)
# What a trace calls Python's own functions of numbers.
_OF_NUMBERS: dict[Any, str] = {
    operator.abs: "abs",
    torch.sym_float: "float",
    torch.sym_int: "int",
    torch.sym_max: "max",
    torch.sym_min: "min",
    torch.sym_sqrt: "math.sqrt",
    "__round__": "round",
}


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes ops of one stage, given the text of a value and of a module path."""

    value: Callable[[fx.Node], str]
    module: Callable[[str], str]

    def statement(self, node: fx.Node, variable: str, wanted: bool) -> str:
        """`node` as lines that leave its result in `variable`, if it is wanted."""
        if node.target in _INPLACE:
            target, operand = (self.argument(arg) for arg in node.args)
            line = f"{target} {_INPLACE[node.target]} {operand}"
            return f"{line}\n{variable} = {target}" if wanted and target != variable else line
        if node.target is operator.setitem:
            owner, index, value = node.args
            return f"{self.argument(owner)}[{self._index(index)}] = {self.argument(value)}"
        return f"{variable} = {self.expression(node)}" if wanted else self.expression(node)

    def expression(self, node: fx.Node) -> str:
        """The right-hand side."""
        target: Any = node.target
        if node.op == "call_module":
            arguments = self._arguments(self._there(node.args, node), node.kwargs)
            return called(node, self.module(str(target)), arguments)
        if target is recomputed:
            method, *values = node.args
            arguments = self._arguments(self._there(values, node), {})
            return called(node, f"self.{method}", arguments)
        if node.op == "call_method":
            owner, *rest = node.args
            if target in _OF_NUMBERS:
                return f"{_OF_NUMBERS[target]}({self._arguments(node.args, node.kwargs)})"
            kwargs = without_defaults(node)
            return f"{self._operand(owner)}.{target}({self._arguments(spread(node, rest), kwargs)})"
        if target in _INFIX:
            left, right = (self._operand(arg) for arg in node.args)
            return f"{left} {_INFIX[target]} {right}"
        if target in _PREFIX:
            return f"{_PREFIX[target]}{self._operand(node.args[0])}"
        if target is operator.getitem:
            return f"{self._operand(node.args[0])}[{self._index(node.args[1])}]"
        if target is by_mode:
            in_training, in_evaluation = (self.argument(arg) for arg in node.args)
            return f"{in_training} if self.training else {in_evaluation}"
        if target is getattr:
            return f"{self._operand(node.args[0])}.{node.args[1]}"
        if target is new_list:
            return self.argument(node.args[0])
        if target is limit:
            return f"torch.finfo({self.argument(node.args[0])}).{node.args[1]}"
        function = function_called(node)
        name = f"{function}.apply" if function else function_name(target)
        return f"{name}({self._arguments(*told_arguments(node))})"

    def argument(self, value: Any) -> str:
        """An argument as text. Raises CaptureError for what has no text."""
        if isinstance(value, fx.Node):
            return self.value(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is Ellipsis:
            return "..."
        if value is None or isinstance(value, bool | int | float | complex | str | Written):
            return repr(value)
        if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
            return str(value)
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.argument, (value.start, value.stop, value.step)))})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.argument, value))}]"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.argument, value))}{',' * (len(value) == 1)})"
        if isinstance(value, dict):
            items = (f"{key!r}: {self.argument(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        raise CaptureError(f"an op has the argument {value!r}, which can't be written as code")

    def _there(self, args: Sequence[Any], node: fx.Node) -> list[Any]:
        """Arguments of a method or a module, None in the mode that does not make them."""

        def there(value: Any) -> Any:
            mode = value.meta.get(MODE) if isinstance(value, fx.Node) else None
            if mode is None or mode is node.meta.get(MODE):
                return value
            condition = "self.training" if mode else "not self.training"
            return Written(f"{self.argument(value)} if {condition} else None")

        return [there(value) for value in args]

    def _operand(self, value: Any) -> str:
        """An argument where only a call, a name or an index may stand without parentheses."""
        text = self.argument(value)
        depth = 0
        for c in text:
            depth += (c in "([{") - (c in ")]}")
            if depth == 0 and c in " -~+":
                return f"({text})"
        return text

    def _arguments(self, args: Any, kwargs: Any) -> str:
        named = [f"{key}={self.argument(value)}" for key, value in kwargs.items()]
        return ", ".join([*map(self.argument, args), *named])

    def _index(self, index: Any) -> str:
        if isinstance(index, tuple) and index:
            return ", ".join(map(self._one_index, index)) + "," * (len(index) == 1)
        return self._one_index(index)

    def _one_index(self, index: Any) -> str:
        if not isinstance(index, slice):
            return self.argument(index)
        start, stop, step = (
            "" if part is None else self.argument(part)
            for part in (index.start, index.stop, index.step)
        )
        return f"{start}:{stop}" + (f":{step}" if step else "")


def called(node: fx.Node, function: str, arguments: str) -> str:
    """The call of `function` that `node` is, through `checkpoint` or not."""
    if CHECKPOINT not in node.meta:
        return f"{function}({arguments})"
    return f"checkpoint({function}, {arguments})" if arguments else f"checkpoint({function})"


def is_statement(node: fx.Node) -> bool:
    """Whether the op is written as a statement, so that it can't stand inside an expression."""
    return node.target in _INPLACE or node.target in (operator.setitem, by_mode)


def function_name(target: Any) -> str:
    """What a function is called in code that imports what `_NAMESPACES` calls it by."""
    if target in _OF_NUMBERS:
        return _OF_NUMBERS[target]
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{target.namespace}.{target._opname}.{target._overloadname}"
    found = _public_names().get(id(target)) or _math_name(target) or _torch_path(target)
    if found is None:
        raise CaptureError(f"an op calls {target!r}, which has no public name to write it by")
    return found


def _math_name(target: Any) -> str | None:
    """The function of `math` that a trace calls by a private one of torch's, `torch._sym_log2`."""
    name = str(getattr(target, "__name__", ""))
    function = name.removeprefix("_sym_")
    is_one = function != name and getattr(torch, name, None) is target and hasattr(math, function)
    return f"math.{function}" if is_one else None


def _torch_path(target: Any) -> str | None:
    """Where a function without a public name is found below `torch`; F's of `torch._C._nn`."""
    name = str(getattr(target, "__name__", ""))
    if getattr(torch._C._nn, name, None) is target and hasattr(functional, name):
        return f"F.{name}"  # what the public function of that name calls
    for parts in (["torch"], str(getattr(target, "__module__", "")).split(".")):
        found: Any = torch if parts[0] == "torch" else None
        for part in [*parts[1:], name]:
            found = getattr(found, part, None)
        if found is target:
            return ".".join([*parts, name])
    return None


@cache
def _public_names() -> dict[int, str]:
    names: dict[int, str] = {}
    for space, module in _NAMESPACES:
        for name in sorted(dir(module)):
            value = getattr(module, name, None)
            if callable(value) and not name.startswith("_"):
                names.setdefault(id(value), f"{space}.{name}")
    return names
