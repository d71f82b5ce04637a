"""The stages together as the original model's state: its names, weights, modes and dtypes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fxpipe.errors import DeviceError, WeightsError
from fxpipe.runtime import stream
from fxpipe.runtime.manifest import StateSpec
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.stream import Device
from fxpipe.runtime.weights import check as weights
from fxpipe.runtime.weights.files import WeightFiles
from fxpipe.runtime.weights.state import State, keys_of


def is_added(key: str, value: object) -> bool:
    """Whether it is in a state_dict besides weights: a module's extra state, or no tensor."""
    return _is_extra_state(key) or not isinstance(value, Tensor)


def _is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == "_extra_state"


def _with_extra(pipe: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A hook of `state_dict` that adds what the original's modules had added to theirs."""
    assert isinstance(pipe, Original)
    state.update({f"{prefix}{key}": value for key, value in pipe._extra.items()})


class Original(nn.Module):
    """Holds what the stages compute with.

    Parameters and buffers have the original's names and order; all attributes of its own are
    private, since children are named by the user.
    """

    def __init__(
        self,
        state: Sequence[StateSpec],
        stages: Sequence[Stage],
        devices: Sequence[Device],
        buffers: Mapping[str, Tensor],
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        """`state` and `buffers` are the whole model's, `elsewhere` the names that others hold."""
        super().__init__()
        self._elsewhere = elsewhere
        self._specs = tuple(spec for spec in state if spec.kind != "constant")
        own = [spec for spec in state if spec.name not in elsewhere]
        values = {name: value for name, value in buffers.items() if name not in elsewhere}
        # A tuple, so that the stages' modules are not registered a second time.
        self._stages = tuple(stages)
        self._devices = tuple(devices)
        self._state = State(self, own, self._stages)
        self._state.load_buffers(self, values)
        self._extra: dict[str, Any] = {}
        self.register_state_dict_post_hook(_with_extra)  # type: ignore[no-untyped-call]

    def train(self, mode: bool = True) -> Self:
        """Switch between training and evaluation, the stages too."""
        super().train(mode)
        for stage in self._stages:
            stage.module.train(mode)
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the original model's weights; nothing is loaded unless all fit.

        Tied weights stay tied with `assign` too, where a plain model has as many as are given.
        Over processes each takes its part of the whole model's, or of its own alone.

        What else the model puts into a whole one, by `get_extra_state` say, is kept, and given
        back by `state_dict`. Raises WeightsError that names all missing, unexpected and wrongly
        shaped keys, or a tied one that `assign` is given with several values.
        """
        tensors = self._tensors()
        wanted = self._wanted(tensors, whole=not self._elsewhere.isdisjoint(state_dict))
        # One that lacks tensors may be something else, as a checkpoint with an epoch in it.
        is_whole = wanted.keys() <= state_dict.keys()
        extra = {
            key: value
            for key, value in state_dict.items()
            if key not in wanted and is_added(key, value) and (is_whole or _is_extra_state(key))
        }
        given = {key: value for key, value in state_dict.items() if key not in extra}
        weights.check(wanted, given, lambda name: given[name].shape, strict, "the state_dict")
        if assign:
            weights.check_ties({s.name: s.alias_of or s.name for s in self._specs}, given)
        parts = {
            key: self._part(tensors[key], value) if key in tensors else value
            for key, value in given.items()
            if key not in self._elsewhere
        }
        result = super().load_state_dict(parts, strict, assign)
        self._state.tie(self, parts)
        self._extra |= extra
        self._loaded()
        return result

    def load_weights(self, path: str | Path, strict: bool = True) -> None:
        """Load safetensors: a file, a folder with one, an index of shards, a package's `weights`.

        Keys are the original model's; of a tied parameter one of its names is enough. Each tensor
        is read on its own and goes to its stage's device and dtype. Nothing is loaded unless all
        fit; `strict` is as in `load_state_dict`. Raises WeightsError that names all missing,
        unexpected and wrongly shaped keys.
        """
        with ExitStack() as opened:
            self._take(*self._found(path, strict, opened))

    def _load_agreed(
        self,
        path: str | Path,
        strict: bool,
        gather: Callable[[str | None], Sequence[str | None]],
    ) -> Sequence[str | None]:
        """`load_weights`, unless a process can't; what keeps each from it, in their order.

        `gather` gives what all processes give.
        """
        problem = None
        with ExitStack() as opened:
            try:
                found = self._found(path, strict, opened)
            except (OSError, WeightsError) as error:
                problem = str(error)
            problems = gather(problem)
            if not any(problems):
                self._take(*found)
        return problems

    def _found(
        self, path: str | Path, strict: bool, opened: ExitStack
    ) -> tuple[WeightFiles, dict[str, Tensor]]:
        """The files at `path`, and by their keys the tensors that they have values for.

        Files are closed with `opened`. Raises WeightsError unless all fit.
        """
        tensors = self._tensors()
        files = opened.enter_context(WeightFiles(path))
        keys = keys_of(self._specs, files.keys)
        wanted = self._wanted(tensors, whole=True)
        weights.check(wanted, keys, lambda name: files.shape(keys[name]), strict, str(path))
        return files, {keys[name]: tensors[name] for name in keys if name in tensors}

    def _take(self, files: WeightFiles, tensors: Mapping[str, Tensor]) -> None:
        """Give tensors the values that files have under their keys."""
        for key, tensor in tensors.items():
            tensor.copy_(self._part(tensor, files.read(key)))
        self._loaded()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse to move; change dtypes of stages and tree alike."""
        for device in set(map(stream.place, self._devices)):
            try:
                moved = fn(torch.empty(0, device=device)).device != device
            except (AssertionError, RuntimeError) as error:
                raise self._fixed(str(error)) from error
            if moved:
                raise self._fixed(f"stages are on {', '.join(map(str, self._devices))}")
        with self._state.without_attributes(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._bind()
        return self

    def _follow(self) -> None:
        """Before a call: let the stages compute with what was put into the tree since the last.

        As `functional_call` does, or who assigns a parameter. Raises WeightsError.
        """
        if not self._state.stands():
            self._bind()

    def _bind(self) -> None:
        """After tensors were replaced: the stages compute with those that stand in the tree."""
        self._state.bind(self)

    def _loaded(self) -> None:
        """After weights were loaded: the stages compute with them."""
        self._bind()

    def _part(self, held: Tensor, given: Tensor) -> Tensor:
        """What this process has of a tensor that was `given`, as it has `held`."""
        return given

    def _wanted(self, tensors: Mapping[str, Tensor], whole: bool) -> dict[str, torch.Size]:
        """Shapes of this process's `tensors`; of the `whole` model's, so that all refuse alike."""
        wanted = {name: tensor.shape for name, tensor in tensors.items()}
        others = [spec for spec in self._specs if whole and spec.name in self._elsewhere]
        return wanted | {spec.name: torch.Size(spec.spec.sizes({})) for spec in others}

    def _tensors(self) -> dict[str, Tensor]:
        """The state_dict without what modules added to it."""
        return {key: value for key, value in self.state_dict().items() if key not in self._extra}

    def _fixed(self, reason: str) -> DeviceError:
        return DeviceError(
            f"a pipeline can't be moved as a whole ({reason}): load the package again with "
            f"devices=..., {len(self._devices)} of them, and load_state_dict this one's weights"
        )
