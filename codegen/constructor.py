"""The constructor of a stage: its modules, parameters and buffers under the original names."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from fxpipe.codegen.names import assignment, child, path
from fxpipe.ir import Capture
from fxpipe.stock import constructor


@dataclass(slots=True)
class _Place:
    """A node of the module tree: a stock module, or a container of what a stage uses of it."""

    module: nn.Module | None = None
    children: dict[str, "_Place"] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)

    @property
    def is_dict(self) -> bool:
        """Whether it holds numbered modules only, as `nn.Sequential` and `nn.ModuleList` do."""
        numbered = bool(self.children) and all(name.isdecimal() for name in self.children)
        return numbered and self.module is None and not self.tensors


@dataclass(frozen=True, slots=True)
class Constructor:
    """The lines of `__init__`, and what they declare.

    `dicts` are the module paths that are an `nn.ModuleDict`; `parameters` and `buffers` are names
    in the model's state.
    """

    lines: tuple[str, ...]
    dicts: frozenset[str]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def construct(capture: Capture, ops: Iterable[fx.Node]) -> Constructor:
    """Declare all that `ops` use of the model, in the order in which they use it."""
    root = _Place()
    held: dict[str, None] = {}
    for node in ops:
        for used in node.all_input_nodes:
            if used.op == "get_attr" and str(used.target) in capture.state:
                name = str(used.target)
                parent, _, last = name.rpartition(".")
                _find(root, parent).tensors[last] = name
                held[name] = None
        if node.op == "call_module":
            target = str(node.target)
            module = capture.modules[target]
            _find(root, target).module = module
            own = [*dict(module.named_parameters()), *dict(module.named_buffers())]
            held.update((f"{target}.{name}", None) for name in own)
    lines, dicts = _declare(capture, root)
    lines += _ties(capture, held, dicts)
    trained = [name for name in held if isinstance(capture.state[name], nn.Parameter)]
    return Constructor(
        lines=tuple(lines),
        dicts=frozenset(dicts),
        parameters=tuple(trained),
        buffers=tuple(name for name in held if name not in trained),
    )


def _find(root: _Place, name: str) -> _Place:
    place = root
    for part in name.split(".") if name else ():
        place = place.children.setdefault(part, _Place())
    return place


def _declare(capture: Capture, root: _Place) -> tuple[list[str], set[str]]:
    lines: list[str] = []
    dicts: set[str] = set()

    def walk(place: _Place, name: str, expression: str) -> None:
        in_dict = place.is_dict and place is not root  # the stage itself is a plain module
        if in_dict:
            dicts.add(name)
        if place.module is None:
            for last, full in place.tensors.items():
                saved = full in capture.saved
                lines.append(_tensor(expression, last, capture.state[full], saved))
        for last, below in place.children.items():
            if below.module is not None:
                value = constructor(below.module)
                assert value is not None, "only stock modules are called"
            else:
                value = "nn.ModuleDict()" if below.is_dict else "nn.Module()"
            lines.append(assignment(expression, last, value, in_dict))
            target = child(expression, last, in_dict)
            lines.extend(_frozen(target, below.module))
            walk(below, f"{name}.{last}" if name else last, target)

    walk(root, "", "self")
    return lines, dicts


def _frozen(target: str, module: nn.Module | None) -> list[str]:
    if module is None:
        return []
    own = dict(module.named_parameters())
    frozen = [name for name, parameter in own.items() if not parameter.requires_grad]
    if frozen and len(frozen) == len(own):
        return [f"{target}.requires_grad_(False)"]
    return [f"{target}.{name}.requires_grad_(False)" for name in frozen]


def _tensor(owner: str, name: str, tensor: Tensor, saved: bool) -> str:
    if not isinstance(tensor, nn.Parameter):
        persistent = "" if saved else ", persistent=False"
        return f"{owner}.register_buffer({name!r}, {_filled('zeros', tensor)}{persistent})"
    frozen = "" if tensor.requires_grad else ", requires_grad=False"
    return assignment(owner, name, f"nn.Parameter({_initial(tensor)}{frozen})")


def _initial(tensor: Tensor) -> str:
    """Values like those the model began with: all equal, or normal with their deviation."""
    flat = tensor.detach().flatten()
    if flat.numel() == 0 or not tensor.is_floating_point():
        return _filled("zeros", tensor)
    first = float(flat[0])
    if bool((flat == first).all()):
        if first in (0.0, 1.0):
            return _filled("ones" if first else "zeros", tensor)
        return f"{_filled('ones', tensor)} * {first:.6g}"
    deviation = float(flat.double().std())
    return f"{_filled('randn', tensor)} * {deviation:.1g}"


def _filled(kind: str, tensor: Tensor) -> str:
    shape = ", ".join(map(str, tensor.shape)) or "()"
    dtype = "" if tensor.dtype == torch.float32 else f", dtype={tensor.dtype}"
    return f"torch.{kind}({shape}{dtype})"


def _ties(capture: Capture, held: Iterable[str], dicts: Container[str]) -> list[str]:
    """Parameters that the model ties, tied where this stage holds both names."""
    lines = []
    first: dict[str, str] = {}
    for name in held:
        owner = first.setdefault(capture.aliases.get(name, name), name)
        if owner != name:
            lines.append(f"{path(name, dicts)} = {path(owner, dicts)}  # tied")
    return lines
