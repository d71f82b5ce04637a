"""What plan.json says that a stage doesn't do, asked of its first forward in each mode.

Who edits a stage, or turns on a dropout that was off as the model was compiled, may let it draw
random numbers or write buffers of which the plan knows nothing: then lanes would draw from each
other's numbers, and what is computed again would draw others and count twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxpipe.errors import StageError
from fxpipe.runtime.manifest import StageSpec

# By module: the modes, training or not, in which it was seen to keep them.
_KEPT: WeakKeyDictionary[nn.Module, set[bool]] = WeakKeyDictionary()


def kept(module: nn.Module) -> bool:
    """Whether the stage was seen to keep them in the mode that it is in."""
    return module.training in _KEPT.get(module, ())


def forget() -> None:
    """Ask all stages again, since a setting of one has changed."""
    _KEPT.clear()


@contextmanager
def keeping(module: nn.Module, spec: StageSpec) -> Iterator[None]:
    """The block is a forward of the stage. Raises StageError that says what plan.json lacks."""
    held = dict(module.named_buffers())
    promised = [name for name in spec.buffers if name not in spec.mutated_buffers and name in held]
    storages = {name: held[name].untyped_storage()._cdata for name in promised}
    with _Watch() as seen:
        yield
    if seen.drawn and not spec.random:
        raise StageError(
            f"{spec.file} draws random numbers ({seen.drawn}), and plan.json says that it doesn't: "
            'let "random" of the stage be true there, or compile the model with what draws them, '
            "such as a dropout above 0"
        )
    written = [name for name, storage in storages.items() if storage in seen.written]
    if written:
        owner = written[0].rpartition(".")[0]
        beside = [name for name in promised if name.rpartition(".")[0] == owner]
        raise StageError(
            f"{spec.file} writes the buffer {written[0]!r}, and plan.json says that it doesn't: "
            'name in "mutated_buffers" of the stage there which of these its forward writes: '
            f"{', '.join(beside)}"
        )
    _KEPT.setdefault(module, set()).add(module.training)


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether an op draws from torch's random generators, which torch tags as seeded."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = given_by_name(func, args, kwargs)
    if False in (given.get("train"), given.get("training")):
        return False
    # Attention and recurrent layers draw for their dropout alone.
    named = ("dropout_p", "dropout", *("p",) * ("dropout" in func.name()))
    names = {argument.name for argument in func._schema.arguments}
    rates = [given.get(name, 0.0) for name in named if name in names]
    return not rates or max(rates) > 0


def writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Iterator[Tensor]:
    """The tensors that an op writes, as its schema says.

    Within a dispatch mode torch counts no version of those that it is given in a list.
    """
    given = given_by_name(func, args, kwargs)
    for argument in func._schema.arguments:
        if argument.is_write:
            leaves = tree_leaves(given.get(argument.name))
            yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


def given_by_name(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The arguments of an op's call by their names."""
    names = (argument.name for argument in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes an op that draws, and the memories that ops write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = ""
        self.written: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else its first op imports Dynamo, which takes a second and is of no use to eager code."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op."""
        if draws(func, args, kwargs):
            self.drawn = str(func)
        self.written |= {t.untyped_storage()._cdata for t in writes(func, args, kwargs)}
        return func(*args, **(kwargs or {}))
