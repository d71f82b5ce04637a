"""How a module of the package is made: a stock constructor, a block class, a chain of such."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from fxpipe.ops.stock import StockModule, stock_module

_BY_PLACE = 2  # so many arguments of a class of the package are given without their names
Take = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class Written:
    """Code that stands where one instance has a number and another instance another number."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Made:
    """One module: its class, the arguments by name, and the parameters that are frozen.

    `stock` is the class if it is one of torch.nn. Of `arguments` only those in `needed` are
    written. An nn.Sequential has its modules in `chain`, by name. `dtypes` are those of the
    parameters within it.
    """

    name: str
    arguments: Mapping[str, Any]
    needed: frozenset[str]
    stock: type[nn.Module] | None = None
    frozen: tuple[str, ...] = ()
    chain: tuple[tuple[str, "Made"], ...] = ()
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.chain:
            return _chain_text(self.chain)
        given = {name: value for name, value in self.arguments.items() if name in self.needed}
        if self.stock is not None:
            return str(StockModule(self.stock, given, self.needed))
        by_place = len(given) <= _BY_PLACE
        texts = (repr(v) if by_place else f"{name}={v!r}" for name, v in given.items())
        return f"{self.name}({', '.join(texts)})"

    def key(self) -> tuple[Any, ...]:
        """What two modules have in common that differ in numbers only."""
        opened = self.mapped(lambda value, name: Written("#"))
        return (
            opened.name,
            opened.frozen,
            tuple((name, repr(value)) for name, value in opened.arguments.items()),
            tuple((name, made.key()) for name, made in opened.chain),
        )

    def mapped(self, take: Take) -> "Made":
        """The same with each number replaced by what `take` gives for it and its name."""
        arguments = {
            name: take(value, name) if is_number(value) else value
            for name, value in self.arguments.items()
        }
        chain = tuple((name, made.mapped(take)) for name, made in self.chain)
        return replace(self, arguments=arguments, chain=chain)

    def needing(self, others: Sequence["Made"]) -> "Made":
        """The same, writing each argument that one of `others`, of equal key, writes."""
        chain = tuple(
            (name, made.needing([other.chain[place][1] for other in others]))
            for place, (name, made) in enumerate(self.chain)
        )
        needed = self.needed.union(*(other.needed for other in others))
        return replace(self, needed=needed, chain=chain)

    def freezes(self, expression: str) -> Iterable[str]:
        """The lines that freeze what is frozen of the module that `expression` is."""
        for name in self.frozen:
            yield f"{expression}{'.' if name else ''}{name}.requires_grad_(False)"
        for place, (name, made) in enumerate(self.chain):
            numbered = name == str(place)
            yield from made.freezes(
                f"{expression}[{place}]" if numbered else f"{expression}.{name}"
            )


def made_of_stock(module: nn.Module) -> Made:
    """How a module of torch.nn that `fxpipe.ops.stock` can rebuild is made."""
    if type(module) is nn.Identity:
        return Made("nn.Identity", {}, frozenset(), nn.Identity)
    found = stock_module(module)
    assert found is not None, "only stock modules are called"
    own = dict(module.named_parameters())
    frozen = tuple(name for name, parameter in own.items() if not parameter.requires_grad)
    if frozen and len(frozen) == len(own):
        frozen = ("",)
    name = f"nn.{found.kind.__name__}"
    dtypes = {name: parameter.dtype for name, parameter in own.items()}
    return Made(name, dict(found.arguments), found.needed, found.kind, frozen, (), dtypes)


def dtypes_within(modules: Iterable[tuple[str, Made]]) -> dict[str, torch.dtype]:
    """Those of the parameters of `modules`, by name."""
    return {f"{path}.{name}": own for path, one in modules for name, own in one.dtypes.items()}


def made_whole(module: nn.Module | None, used: Collection[str]) -> Made | None:
    """How a stock module is made whose own tensors, all of them, are read by ops of others."""
    if module is None or any(module.children()):
        return None
    own = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    if own != set(used) or stock_module(module) is None:
        return None
    return made_of_stock(module)


def is_number(value: Any) -> bool:
    """Whether `value` is a number or a tuple of numbers, so that another may stand there."""
    if isinstance(value, tuple):
        return bool(value) and all(is_number(item) for item in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _chain_text(chain: Sequence[tuple[str, Made]]) -> str:
    if [name for name, _ in chain] != [str(place) for place in range(len(chain))]:
        pairs = ", ".join(f"({name!r}, {made})" for name, made in chain)
        return f"nn.Sequential(OrderedDict([{pairs}]))"
    parts = []
    for text, run in groupby(str(made) for _, made in chain):
        count = len(list(run))
        many = count > 2 and len(text) * count > 60
        parts += [f"*({text} for _ in range({count}))"] if many else [text] * count
    return f"nn.Sequential({', '.join(parts)})"
