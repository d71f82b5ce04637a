"""Layers that stash tensors for later layers and pop those of earlier ones."""

from collections.abc import Callable, Generator, Iterable
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from fxpipe.compat.skip.namespace import Namespace
from fxpipe.compat.skip.tracker import Skip, current_skip_tracker

Self = TypeVar("Self", bound="Skippable")


class stash:  # noqa: N801
    """`yield stash(name, tensor)` in forward puts the tensor, or None, by."""

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name = name
        self.tensor = tensor


class pop:  # noqa: N801
    """`tensor = yield pop(name)` in forward gives what was put by."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Skippable(nn.Module):
    """A layer of class `module_cls`; subclasses are made by `skippable`."""

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[frozenset[str]]
    poppable_names: ClassVar[frozenset[str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def stashable(self) -> list[Skip]:
        """What it stashes, in order of name."""
        return [(self.namespaces.get(name), name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[Skip]:
        """What it pops, in order of name."""
        return [(self.namespaces.get(name), name) for name in sorted(self.poppable_names)]

    def isolate(self: Self, ns: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """The layer itself, its skips (those in `only`) moved into the namespace."""
        names = self.stashable_names | self.poppable_names if only is None else set(only)
        self.namespaces |= dict.fromkeys(names, ns)
        return self

    def forward(self, *inputs: Any) -> Any:
        """The layer's output. Raises RuntimeError for skips other than those declared."""
        tracker = current_skip_tracker()
        popped: dict[str, Tensor | None] = {}
        for skip in self.poppable():
            if skip not in tracker.tensors:
                raise RuntimeError(f"'{skip[1]}' has not been stashed")
            popped[skip[1]] = tracker.tensors.pop(skip)
        stashed: dict[str, Tensor | None] = {}
        output = self._dispatch(self.module(*inputs), stashed, popped)
        self._refuse_leftovers(self.stashable_names - stashed.keys(), "stashed")
        self._refuse_leftovers(popped.keys(), "popped")
        for skip in self.stashable():
            tracker.tensors[skip] = stashed[skip[1]]
        return output

    def _dispatch(
        self, output: Any, stashed: dict[str, Tensor | None], popped: dict[str, Tensor | None]
    ) -> Any:
        """What the layer returns, after the commands that it yields."""
        if not isinstance(output, Generator):
            return output
        answer: Tensor | None = None
        while True:
            try:
                command = output.send(answer)
            except StopIteration as end:
                return end.value
            answer = None
            if isinstance(command, stash):
                self._refuse_undeclared(command.name, self.stashable_names, "stashable")
                stashed[command.name] = command.tensor
            elif isinstance(command, pop):
                self._refuse_undeclared(command.name, self.poppable_names, "poppable")
                if command.name not in popped:
                    raise RuntimeError(f"'{command.name}' has been popped already")
                answer = popped.pop(command.name)
            else:
                raise TypeError(f"{command!r} is not a command from @skippable")

    def _refuse_undeclared(self, name: str, declared: frozenset[str], kind: str) -> None:
        if name not in declared:
            raise RuntimeError(f"'{name}' has not been declared as {kind}")

    def _refuse_leftovers(self, names: Iterable[str], done: str) -> None:
        if names:
            listed = ", ".join(f"'{name}'" for name in sorted(names))
            raise RuntimeError(f"{listed} must be {done} but have not")


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """The decorator of a layer class that stashes and pops skips of these names.

    Its forward yields commands and returns the output:

        @skippable(stash=["early"])
        class First(nn.Module):
            def forward(self, x):
                yield stash("early", x)
                return self.conv(x)

        @skippable(pop=["early"])
        class Last(nn.Module):
            def forward(self, x):
                early = yield pop("early")
                return self.conv(x) + early
    """
    names = {"stashable_names": frozenset(stash), "poppable_names": frozenset(pop)}

    def decorated(module_cls: type[nn.Module]) -> type[Skippable]:
        about = {"__module__": module_cls.__module__, "__doc__": module_cls.__doc__}
        return type(module_cls.__name__, (Skippable,), {"module_cls": module_cls, **names, **about})

    return decorated
