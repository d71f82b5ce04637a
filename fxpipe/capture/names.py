"""The model's own names: of modules by identity, of parameters, buffers and tensor attributes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fxpipe.memory import storage_of
from fxpipe.runtime.weights.original import is_added


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Which names each module and tensor of a model has, first one first, in the model's order.

    `stateless` are modules without tensors and without modules of their own; `saved` are the names
    that a state_dict has.
    """

    modules: dict[int, list[str]]
    stateless: frozenset[int]
    tensors: dict[int, list[str]]
    state: dict[str, Tensor]
    saved: frozenset[str]

    def paths(self, stack: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """The path of each module in `nn_module_stack` that is the model's, and its key there.

        Keys are `str(id(module))`, with `@n` behind it on the n-th repeated call. Of a module
        without state, as an activation that many blocks share, each block has one of its own.
        """
        found: list[tuple[str, str]] = []
        for key in stack:
            number = key.partition("@")[0]
            names = self.modules.get(int(number), []) if number.isdigit() else []
            above = found[-1][0] if found else ""
            near = [name for name in names if name.rpartition(".")[0] == above]
            if names:
                own = near if int(number) in self.stateless else []
                found.append(((own or names)[0], key))
        return tuple(found)

    def tensor(self, tensor: Tensor, module: str) -> str | None:
        """The name under which `module` would call `tensor`, else its first name.

        A tied parameter appears in the graph under an arbitrary one of its names.
        """
        names = self.tensors.get(id(tensor), [])
        near = [name for name in names if name.rpartition(".")[0] == module]
        return next(iter(near or names), None)

    def add_constant(self, name: str, tensor: Tensor) -> None:
        """Name a tensor that tracing made, or found: a parameter in a list is no model's own."""
        self.state[name] = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
        self.tensors[id(tensor)] = [name]

    def add_constants_of(self, other: "ModelNames") -> None:
        """Take over what tracing made, where it knew the same model by names of its own."""
        for name in other.state.keys() - self.state.keys():
            self.add_constant(name, other.state[name])

    def copy(self) -> "ModelNames":
        """The same names, to which constants can be added."""
        return ModelNames(
            self.modules, self.stateless, dict(self.tensors), dict(self.state), self.saved
        )

    @property
    def aliases(self) -> dict[str, str]:
        """Each further name of a tensor to its first."""
        return {alias: names[0] for names in self.tensors.values() for alias in names[1:]}


def model_names(model: nn.Module) -> ModelNames:
    """Read all names off `model`."""
    modules: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(id(module), []).append(path)
    saved = {k: v for k, v in model.state_dict(keep_vars=True).items() if not is_added(k, v)}
    state = {**saved, **{k: v for k, v in all_tensors(model) if k not in saved}}
    tensors: dict[int, list[str]] = {}
    for name, tensor in state.items():
        tensors.setdefault(id(tensor), []).append(name)
    stateless = {
        id(module)
        for module in model.modules()
        if not any(isinstance(kept, Tensor | nn.Module) for kept in _kept(module))
    }
    return ModelNames(modules, frozenset(stateless), tensors, state, frozenset(saved))


def _kept(module: nn.Module) -> Iterator[object]:
    """All attributes of a module, its tensors and modules among them."""
    for kept in (vars(module), module._parameters, module._buffers, module._modules):
        yield from kept.values()


def derived(model: nn.Module, state: Mapping[str, Tensor]) -> set[str]:
    """Names of tensors that are made of parameters, as old parametrizations keep them.

    Each forward makes them anew before it reads them.
    """
    trained = {storage_of(parameter) for parameter in model.parameters()}
    return {
        name
        for name, tensor in state.items()
        if not isinstance(tensor, nn.Parameter)
        and (tensor.grad_fn is not None or storage_of(tensor) in trained)
    }


def all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and plain tensor attributes, which a state_dict leaves out.

    One that hides a method, `self.half`, is called `half_`: a buffer can't be.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, value in {**module._parameters, **module._buffers, **vars(module)}.items():
            if isinstance(value, Tensor):
                yield f"{prefix}{name}_" if hasattr(nn.Module, name) else prefix + name, value


def attribute(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the tensor `name` of `all_tensors`, and what that calls it itself."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    return owner, leaf if hasattr(owner, leaf) else leaf.removesuffix("_")
