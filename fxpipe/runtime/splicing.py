"""A pipeline of a part of a model, put into the model: the rest runs as it is."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.runtime.manifest import PartSpec
from fxpipe.runtime.pipeline import Pipeline
from fxpipe.runtime.structure import rebuild
from fxpipe.runtime.unchanged import code_of, first_change
from fxpipe.runtime.weights.share import follow_modes, held_by, share


def splice(model: nn.Module, pipe: Pipeline) -> nn.Module:
    """`model` itself, which runs the part that `pipe` was compiled from as a pipeline from now on.

    Both hold the same parameters and buffers, those of `model`, which keeps its names. Where the
    part is a run of modules, the first one takes what goes in and the last one gives what comes
    out; what stands between can't be read. Over processes all call it together: what stands around
    gets the first one's values on each, and of the part each keeps what its own stages use. Raises
    InputError if `pipe` is of a whole model, or if `model` lacks the part.
    """
    part = pipe.manifest.part
    if part is None:
        raise InputError(
            f"the pipeline is of all of {pipe.manifest.model}: call it in the model's place"
        )
    try:
        modules = [model.get_submodule(path) for path in part.modules]
    except AttributeError as error:
        raise InputError(
            f"{type(model).__name__} lacks what the package is a part of: {error}"
        ) from error
    share(pipe, model)
    pipe._spliced()
    code, shared = code_of(modules, part.modules), held_by(model, pipe)

    def call(**given: Any) -> Any:
        nonlocal shared
        changed = first_change(code, code_of(modules, part.modules))
        if changed is not None:
            raise InputError(
                f"{changed} is not what it was as the pipeline was spliced in, which has the code "
                "of before: change the model before you compile it, and splice that"
            )
        if any(a is not b for a, b in zip(held_by(model, pipe), shared, strict=True)):
            if pipe._elsewhere:
                raise InputError(
                    "a parameter or buffer of the part is another tensor than before, and other "
                    "processes have a part of them: copy into those that are there"
                )
            share(pipe, model)
            shared = held_by(model, pipe)
        follow_modes(pipe, model)
        return pipe(**given)

    stand_in(modules, part, call, pipe)
    return model


def spliced_into(model: nn.Module) -> list[Pipeline]:
    """The pipelines that run parts of `model`."""
    stands = [module.__dict__.get("forward") for module in model.modules()]
    return [s.pipe for s in stands if isinstance(s, _Stand) and s.pipe is not None]


def stand_in(
    modules: Sequence[nn.Module],
    part: PartSpec,
    call: Callable[..., Any],
    pipe: Pipeline | None = None,
) -> None:
    """Let `call`, which runs `pipe`, compute what `modules` do, from what goes into the first."""
    for k, module in enumerate(modules):
        module.forward = _Stand(module, part, k, call, pipe)


class ReadError(InputError):
    """The model reads what module `k` of a part would give, which only the next one can."""

    def __init__(self, message: str, k: int) -> None:
        super().__init__(message)
        self.k = k


class _Pending:
    """Stands for a value that module `k` of the part would give; `given` went into the first."""

    __slots__ = ("given", "k", "part")

    def __init__(self, given: Mapping[str, Any], part: PartSpec, k: int) -> None:
        self.given = given
        self.part = part
        self.k = k

    def refuse(self, *args: object, **kwargs: object) -> Any:
        """Raise ReadError."""
        here = self.part.modules[self.k]
        raise ReadError(
            f"the model reads what {here} gives before {self.part.modules[self.k + 1]} does, but "
            "both are in one pipeline: compile the model again as it is called now",
            self.k,
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse to be an argument of any torch function."""
        for each in (*args, *(kwargs or {}).values()):
            if isinstance(each, cls):
                each.refuse()
        return NotImplemented

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.refuse()

    __bool__ = __len__ = __iter__ = __getitem__ = __float__ = __int__ = refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = refuse
    __lt__ = __gt__ = __le__ = __ge__ = __matmul__ = __neg__ = refuse


class _Stand:
    """The forward of module `k` of the part."""

    def __init__(
        self,
        module: nn.Module,
        part: PartSpec,
        k: int,
        call: Callable[..., Any],
        pipe: Pipeline | None,
    ) -> None:
        original: Callable[..., Any] = type(module).forward
        self._parameters = inspect.signature(original.__get__(module))
        self._part = part
        self._k = k
        self._call = call
        self.pipe = pipe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The part's output from its last module; before, something that only the next can use."""
        given = self._named(args, kwargs)
        if self._k > 0:
            given = self._first(given)
        if self._k < len(self._part.modules) - 1:
            pending = _Pending(given, self._part, self._k)
            return rebuild(self._part.between, _Repeated(pending))
        return self._call(**given)

    def __deepcopy__(self, _: object) -> NoReturn:
        raise InputError(
            "a spliced model can't be copied: the copy would run this one's part. Copy the model "
            "before, and splice a pipeline of its own into the copy: load the package again"
        )

    def _named(self, args: Any, kwargs: Any) -> dict[str, Any]:
        bound = self._parameters.bind(*args, **kwargs).arguments
        kinds = {name: p.kind for name, p in self._parameters.parameters.items()}
        given: dict[str, Any] = {}
        for name, value in bound.items():
            given.update(value if kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value})
        return given

    def _first(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the first module was given, once it is clear that this one follows."""
        pending = given.pop(self._part.argument, None)
        here, before = self._part.modules[self._k], self._part.modules[self._k - 1]
        if not isinstance(pending, _Pending) or pending.k != self._k - 1:
            raise InputError(
                f"{here} is in one pipeline with {before} and takes what that gives, but was given "
                "something else: compile the model again as it is called now"
            )
        for name, value in given.items():
            first = pending.given.get(name)
            if value is not first and (isinstance(value, Tensor) or value != first):
                raise InputError(
                    f"{here} was given another {name!r} than {self._part.modules[0]}, but both are "
                    "in one pipeline: compile the model again as it is called now"
                )
        return dict(pending.given)


class _Repeated(list[Any]):
    """The same item at every place."""

    def __init__(self, item: Any) -> None:
        super().__init__()
        self._item = item

    def __getitem__(self, index: Any) -> Any:
        return self._item
