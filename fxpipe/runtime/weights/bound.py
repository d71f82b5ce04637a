"""What stood in a pipeline's tree when it was bound, to notice what has taken its place since."""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass

from torch import Tensor, nn

from fxpipe.errors import WeightsError
from fxpipe.runtime.swapping import holder_of


@dataclass(slots=True)
class Place:
    """Where a module holds a tensor, and the one that was bound."""

    held: MutableMapping[str, Tensor | None]
    leaf: str
    bound: Tensor | None

    @classmethod
    def of(cls, root: nn.Module, name: str) -> "Place":
        """Where `name` is below `root`, and what is there."""
        holder, leaf = holder_of(root, name), name.rpartition(".")[2]
        held = holder._parameters if leaf in holder._parameters else holder._buffers
        return cls(held, leaf, held[leaf])  # type: ignore[arg-type]

    @property
    def now(self) -> Tensor | None:
        """What is there."""
        return self.held.get(self.leaf)


class Bound:
    """The modules below `root`, and its tensors, each name by the first of those tied to it."""

    def __init__(self, root: nn.Module, first_names: Mapping[str, str]) -> None:
        self._first_names = first_names
        self._places = {name: Place.of(root, name) for name in first_names}
        self._modules = [
            (module._modules, name, child, f"{path}.{name}" if path else name)
            for path, module in root.named_modules()
            for name, child in module._modules.items()
        ]

    def put(self, name: str, tensor: Tensor | None) -> None:
        """Let `tensor` stand there from now on."""
        place = self._places[name]
        place.held[place.leaf] = place.bound = tensor

    def stands(self) -> bool:
        """Whether all of it still stands there.

        Raises WeightsError if stages can't follow what took its place: another tensor of that shape
        they can, other modules they can't, since their code calls its own, nor other ties.
        """
        for held, name, child, path in self._modules:
            if held.get(name) is not child:
                raise _beyond(f"module {path!r} was replaced")
        changed = [name for name, place in self._places.items() if place.now is not place.bound]
        if changed:
            self._check(changed)
        return not changed

    def _check(self, changed: Iterable[str]) -> None:
        first_names: dict[int, set[str]] = {}
        for name, place in self._places.items():
            first_names.setdefault(id(place.now), set()).add(self._first_names[name])
        for name in changed:
            place, first = self._places[name], self._first_names[name]
            now, bound = place.now, place.bound
            if now is None or bound is None:
                raise _beyond(f"{name!r} is gone, as if it was parametrized or pruned")
            if now.shape != bound.shape:
                shapes = f"{list(now.shape)}, where it had {list(bound.shape)}"
                raise _beyond(f"{name!r} was replaced by one of shape {shapes}")
            if self._places[first].now is not now:
                raise _beyond(f"{name!r} and {first!r} were one and no longer are")
            for other in first_names[id(now)] - {first}:
                raise _beyond(f"{name!r} and {other!r} are one now")


def _beyond(what: str) -> WeightsError:
    return WeightsError(
        f"the pipeline's {what}, which its stages weren't compiled for: do that to the model, and "
        "compile it again"
    )
