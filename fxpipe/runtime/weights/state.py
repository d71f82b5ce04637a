"""The original model's parameters and buffers under its own names, shared with the stages.

A tree of empty modules below the pipeline holds them, so that `named_parameters`, `state_dict`,
optimizers and dtype changes see the original model. What stands in the tree is the truth: `bind`
puts the same objects into the stages, again where others have taken their place.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.runtime.batchnorm import deferred
from fxpipe.runtime.manifest import StateSpec
from fxpipe.runtime.promises import forget
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.ties import Tie, Use
from fxpipe.runtime.weights.bound import Bound, Place
from fxpipe.runtime.weights.modes import Modes


class Shell(nn.Module):
    """A module of the original's tree: its state, and the stages' modules that do its work."""

    def __init__(self) -> None:
        super().__init__()
        # In a tuple, so that they do not count as children.
        self._twins: tuple[nn.Module, ...] = ()

    def __getitem__(self, key: int | str) -> nn.Module:
        """The child of that name, as the original's list or dict of modules gives it."""
        child = self._modules.get(str(key))
        if child is None:
            raise (IndexError if isinstance(key, int) else KeyError)(key)
        return child

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"the pipeline's modules have the model's parameters and buffers, but no {name!r}, "
                "and no methods: call that of the model's module, and give the pipeline the "
                "model's state_dict() with load_state_dict"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Weights stand here alone; a setting, as a dropout's `p`, is the stages' modules' too."""
        here = name in self._parameters or name in self._buffers or name in self._modules
        if not (here or name.startswith("_") or isinstance(value, Tensor | nn.Module)):
            self._set_in_stages(name, value)
        super().__setattr__(name, value)

    def _set_in_stages(self, name: str, value: object) -> None:
        if name == "forward":
            self._refuse_hook()
        twins = [twin for twin in self._twins if hasattr(twin, name)]
        if not twins and name != "training":
            raise InputError(
                f"{name!r} was set on one of the pipeline's modules, and no stage's module has it: "
                "what a model's code reads besides weights is built in as it was compiled. Change "
                "it in the model before, or in the stage's file"
            )
        if name != "training":
            forget()
        for twin in twins:
            setattr(twin, name, value)

    def train(self, mode: bool = True) -> "Shell":
        """Switch the stages' modules too."""
        super().train(mode)
        for twin in self._twins:
            twin.train(mode)
        return self

    def _refuse_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(
            "the pipeline's modules hold its weights, but no stage's code calls them, nor a hook "
            "there: put it on the model's module before you compile it, on a parameter, or on the "
            "pipeline itself"
        )

    register_forward_hook = _refuse_hook
    register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook


class State:
    """All parameters and buffers of a pipeline, in the original's order.

    They stand below `root`, the pipeline, which each method is given: no cycle keeps it alive.
    """

    def __init__(
        self, root: nn.Module, specs: Sequence[StateSpec], stages: Sequence[Stage]
    ) -> None:
        self._specs = specs
        self._stages = stages
        self._deferred = deferred(stage.module for stage in stages)
        self._uses: dict[str, list[Use]] = {}
        first_names = {spec.name: _first_name(spec) for spec in specs}
        for stage in stages:
            for name in (*stage.spec.parameters, *stage.spec.buffers):
                self._uses.setdefault(first_names[name], []).append((stage, name))
        tensors: dict[str, Tensor] = {}
        for spec in specs:
            first = _first_name(spec)
            if first not in tensors:
                tensors[first] = self._initial(spec)
            _register(root, spec, tensors[first])
        for stage in stages:
            for path, module in stage.module.named_modules():
                if path:
                    shell(root, path)._twins += (module,)
        self.ties = tuple(self._ties())
        self._modes = Modes(root, stages)
        self.bind(root)

    @property
    def first_names(self) -> list[str]:
        """A name of each parameter and buffer."""
        return list(dict.fromkeys(map(_first_name, self._specs)))

    def parameters(self, root: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters by each of their names."""
        return dict(root.named_parameters(remove_duplicate=False))

    @contextmanager
    def without_attributes(self, root: nn.Module) -> Iterator[None]:
        """Take out of the tree, for as long, what no change of dtype reaches in the original."""
        names = [spec.name for spec in self._specs if spec.keeps_dtype]
        kept = {name: _tensor(root, name) for name in names}
        try:
            for name in names:
                put(root, name, None)
            yield
        finally:
            for name, tensor in kept.items():
                put(root, name, tensor)

    def bind(self, root: nn.Module) -> None:
        """Give the stages, and further names of tied parameters, what stands in the tree."""
        for spec in self._specs:
            put(root, spec.name, _tensor(root, _first_name(spec)))
        for first, uses in self._uses.items():
            tensor, owner = _tensor(root, first), uses[0][0]
            if tensor.device != owner.device:
                # As `load_state_dict(assign=True)` leaves it.
                tensor.data = tensor.data.to(owner.device)
            for stage, name in uses:
                if stage.device == owner.device:
                    put(stage.module, name, tensor)
                elif isinstance(tensor, nn.Parameter):
                    # A copy comes with each call.
                    put(stage.module, name, None)
                else:
                    put(stage.module, name, tensor.to(stage.device))
        self._bound = Bound(root, {spec.name: _first_name(spec) for spec in self._specs})
        self._written = [
            (name, Place.of(stage.module, name))
            for stage in self._stages
            for name in stage.spec.mutated_buffers
        ]

    def tie(self, root: nn.Module, given: Iterable[str]) -> None:
        """Let names that were not `given` have what another name of their tensor was."""
        for name, key in keys_of(self._specs, given).items():
            if name != key:
                put(root, name, _tensor(root, key))

    def stands(self) -> bool:
        """Whether the tree is as it was bound. Raises WeightsError if it can't be bound anew."""
        return self._bound.stands()

    def begin(self, m: int) -> None:
        """Tell deferred batch norms of a mini-batch of m micro-batches; one that failed is gone.

        Raises InputError if a module is in another mode than its lines.
        """
        self._modes.check()
        for norm in self._deferred:
            norm.begin(m)

    def take_buffers(self) -> None:
        """After a call, take over buffers that a stage replaced instead of writing into them."""
        for name, place in self._written:
            self._bound.put(name, place.now)

    def load_buffers(self, root: nn.Module, values: Mapping[str, Tensor]) -> None:
        """Copy saved values of buffers and constants in."""
        with torch.no_grad():
            for name, value in values.items():
                _tensor(root, name).copy_(value)
        self.bind(root)

    def _initial(self, spec: StateSpec) -> Tensor:
        uses = self._uses.get(_first_name(spec))
        if uses is None:
            zeros = torch.zeros(spec.spec.sizes({}), dtype=spec.spec.torch_dtype)
            tensor: Tensor = nn.Parameter(zeros, False) if spec.kind == "parameter" else zeros
        else:
            stage, name = uses[0]
            held = _get(stage.module, name)
            assert held is not None
            tensor = held
        tensor.data = tensor.data.to(spec.spec.torch_dtype)
        if spec.kind == "parameter":
            tensor.requires_grad_(spec.spec.requires_grad)
        return tensor

    def _ties(self) -> Iterator[Tie]:
        for first, uses in self._uses.items():
            owner = uses[0][0]
            by_lane: dict[int, list[Use]] = {}
            for stage, name in uses:
                if stage.lane != owner.lane and name in stage.spec.parameters:
                    by_lane.setdefault(stage.lane, []).append((stage, name))
            for there in by_lane.values():
                yield Tie(first, tuple(there), there[0][0].device == owner.device)


def keys_of(specs: Sequence[StateSpec], given: Iterable[str]) -> dict[str, str]:
    """Each given key by its name; of a tensor whose name is not given, another of its names."""
    keys = {key: key for key in given}
    tied: dict[str, str] = {}
    for spec in specs:
        if spec.name in keys:
            tied.setdefault(_first_name(spec), spec.name)
    absent = [spec for spec in specs if spec.name not in keys]
    found = {spec.name: tied[_first_name(spec)] for spec in absent if _first_name(spec) in tied}
    return keys | found


def _first_name(spec: StateSpec) -> str:
    return spec.alias_of or spec.name


def _register(root: nn.Module, spec: StateSpec, tensor: Tensor) -> None:
    path, _, leaf = spec.name.rpartition(".")
    holder = shell(root, path) if path else root
    if isinstance(tensor, nn.Parameter):
        holder._parameters[leaf] = tensor
    else:
        holder._buffers[leaf] = tensor
    if spec.kind == "constant":
        holder._non_persistent_buffers_set.add(leaf)


def shell(root: nn.Module, path: str) -> Shell:
    """The shell at `path`, made if there is none; straight into `_modules`, since a child may
    have the name of a method.
    """
    module = root
    for part in path.split("."):
        module = module._modules.setdefault(part, Shell()) or root
    assert isinstance(module, Shell)
    return module


def _tensor(root: nn.Module, name: str) -> Tensor:
    tensor = _get(root, name)
    assert tensor is not None
    return tensor


def _get(module: nn.Module, name: str) -> Tensor | None:
    return Place.of(module, name).now


def put(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Put `tensor` in the place of the module's parameter or buffer `name`."""
    place = Place.of(module, name)
    place.held[place.leaf] = tensor
