"""Checkpoints of a training run, by `torch.distributed.checkpoint`, under the original names.

    fxpipe.checkpoint.save("run/last", pipe, optimizer, {"step": step})
    if fxpipe.checkpoint.exists("run/last"):
        extra = fxpipe.checkpoint.load("run/last", pipe, optimizer)

Saved under one plan, a checkpoint is loaded under another: other stages, another schedule, more
processes or one; the plain model itself can load it too. Of a weight that several processes hold
one copy is written. A folder that a process died over is never taken for a whole checkpoint.
"""

import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fxpipe.errors import WeightsError
from fxpipe.outputs import beside
from fxpipe.runtime.distributed.dtensors import empty_beside
from fxpipe.runtime.distributed.pipeline import DistributedPipeline
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.weights import check as weights
from fxpipe.runtime.weights.original import Original

# What separates a parameter's name from a key of its optimizer state: no name has it.
_SLASH = "/"
_LAST_WRITTEN = ".metadata"  # by torch, once all else is there
# What an optimizer's group has that other stages' processes have otherwise.
_OF_THIS_PLAN = ("params", "param_names")


def save(
    path: str | Path,
    pipe: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: object = None,
) -> None:
    """Write weights, buffers, the optimizer's state and `extra` into the folder `path`.

    All ranks of a pipeline over processes call it together, on a file system that they share;
    `extra` is the first one's. What stood there stays until the new one is whole. Raises
    WeightsError, alike on all.
    """
    folder, ranks = Path(path), _begin(pipe, "checkpoint.save")
    writing, before = beside(folder, "writing"), beside(folder, "before")
    first = _is_first(ranks)
    problem: WeightsError | None = None

    def make_room() -> None:
        _refuse_other(folder)
        for left in (writing, before) if folder.exists() else (writing,):
            shutil.rmtree(left, ignore_errors=True)
        writing.mkdir(parents=True)

    def put_in_place() -> None:
        _refuse_scattered(writing)
        if folder.exists():
            folder.rename(before)
        writing.rename(folder)
        shutil.rmtree(before, ignore_errors=True)

    with _telling(ranks):
        state: dict[str, Any] = {"model": dict(pipe.state_dict())}
        if optimizer is not None:
            state["optimizer"] = _optimizer_state(pipe, optimizer)
        if first:
            state["extra"] = SimpleNamespace(value=extra)
        what = f"{path} can't be written"
        try:
            _agree(ranks, what, lambda: make_room() if first else None)
            _together(ranks, what, partial(dcp_save, state, checkpoint_id=writing))
            _agree(ranks, what, lambda: put_in_place() if first else None)
        except WeightsError as error:  # all have it: none need be told
            problem = error
    if problem is not None:
        raise problem


def exists(path: str | Path) -> bool:
    """Whether `load` would find a checkpoint at `path`, one that `save` has finished."""
    return (_place(Path(path)) / _LAST_WRITTEN).is_file()


def load(path: str | Path, pipe: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load what `save` wrote into `pipe` and `optimizer`, in place; gives `extra` back.

    Nothing is loaded unless all keys and shapes fit. Raises WeightsError.
    """
    ranks = _begin(pipe, "checkpoint.load")
    with _telling(ranks):
        reader = FileSystemReader(_place(Path(path)))
        try:
            metadata = reader.read_metadata()
        except OSError as error:
            raise WeightsError(f"{path} is no whole checkpoint: {error}") from error
        model = dict(pipe.state_dict())
        _check(metadata, model, str(path))
        wanted: dict[str, Any] = {"model": model, "extra": None}
        if optimizer is not None:
            wanted["optimizer"] = _templates(metadata, pipe, optimizer, str(path))
        loader = partial(dcp_load, wanted, storage_reader=reader)
        _together(ranks, f"{path} can't be read", loader)
        pipe.load_state_dict(wanted["model"])
        if optimizer is not None:
            _give_state(pipe, optimizer, wanted["optimizer"])
    return wanted["extra"].value


def _begin(pipe: nn.Module, work: str) -> Ranks | None:
    if not isinstance(pipe, DistributedPipeline):
        if isinstance(pipe, Original) and pipe._elsewhere:
            raise WeightsError(
                "this process holds a part of the model's weights, others the rest: save its "
                "state_dict() with torch.distributed.checkpoint, by all of them together"
            )
        return None
    pipe._ranks.progress.begin(work)
    return pipe._ranks


def _telling(ranks: Ranks | None) -> AbstractContextManager[None]:
    return nullcontext() if ranks is None else ranks.telling()


def _is_first(ranks: Ranks | None) -> bool:
    return ranks is None or ranks.world_rank == 0


def _together(ranks: Ranks | None, what: str, run: Callable[..., object]) -> None:
    """Run a call of torch's that all ranks make. Raises WeightsError, alike on all."""
    failed: list[CheckpointException] = []

    def collective() -> None:
        try:
            run(process_group=None if ranks is None else ranks.world_group, no_dist=ranks is None)
        except CheckpointException as error:
            failed.append(error)

    if ranks is not None:
        ranks.together(collective)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            collective()
    if failed:
        raise WeightsError(f"{what}: {failed[0]}") from failed[0]


def _agree(ranks: Ranks | None, what: str, run: Callable[[], None]) -> None:
    """Run it once all come here. Raises WeightsError, alike on all, if it fails on one."""
    problem = None
    try:
        run()
    except (OSError, WeightsError) as error:
        problem = str(error)
    problems = [problem] if ranks is None else ranks.gather_world(problem)
    for each in problems:
        if each is not None:
            raise WeightsError(f"{what}: {each}")


def _refuse_other(folder: Path) -> None:
    """Raise WeightsError if something else than a checkpoint is there: it would be replaced."""
    empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not empty and not exists(folder):
        raise WeightsError("what is there is no whole checkpoint: move it, or save elsewhere")


def _refuse_scattered(folder: Path) -> None:
    """Raise WeightsError unless all files that ranks wrote are here."""
    stored = FileSystemReader(folder).read_metadata().storage_data
    names = {place.relative_path for place in stored.values()}
    missing = sorted(names - {path.name for path in folder.iterdir()})
    if missing:
        raise WeightsError(
            f"{', '.join(missing[:8])} is not where rank 0 looks: all ranks write into one folder, "
            "on a file system that they share"
        )


def _place(folder: Path) -> Path:
    """Where the checkpoint is: beside its place if a process died as it put a new one there."""
    before = beside(folder, "before")
    return before if before.exists() and not folder.exists() else folder


def _check(metadata: Metadata, model: Mapping[str, Any], path: str) -> None:
    """Raise WeightsError unless each tensor of the model is there, with its shape."""
    sizes = {
        key.removeprefix("model."): found.size
        for key, found in metadata.state_dict_metadata.items()
        if key.startswith("model.") and not isinstance(found, BytesStorageMetadata)
    }
    tensors = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    given = {name: size for name, size in sizes.items() if name in tensors}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    weights.check(shapes, given, given.__getitem__, True, path)


def _names(pipe: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """The original names of what the optimizer trains."""
    names: dict[Tensor, str] = {tensor: name for name, tensor in pipe.named_parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if foreign:
        raise WeightsError(
            f"the optimizer trains a parameter of shape {list(foreign[0].shape)} that is none of "
            "the pipeline's: save it with one over pipe.parameters()"
        )
    return names


def _optimizer_state(pipe: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """By parameter and key, its state; by parameter, its group's settings."""
    names = _names(pipe, optimizer)
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in _OF_THIS_PLAN}
        whole = SimpleNamespace(value=settings)  # a dict would be taken apart
        for parameter in group["params"]:
            name = names[parameter]
            found[name] = whole
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}{_SLASH}{key}"] = value
    return found


def _templates(
    metadata: Metadata, pipe: nn.Module, optimizer: torch.optim.Optimizer, path: str
) -> dict[str, Any]:
    """What there is to load of the optimizer's own parameters."""
    parameters = {name: parameter for parameter, name in _names(pipe, optimizer).items()}
    found: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        own = key.removeprefix("optimizer.")
        name, _, field = own.partition(_SLASH)
        if own != key and name in parameters:
            # A count of steps is no part of the parameter's, also where that has no dimensions.
            beside = None if field == "step" else parameters[name]
            found[own] = (
                empty_beside(beside, stored.size, stored.properties.dtype)
                if isinstance(stored, TensorStorageMetadata)
                else None
            )
    trained = {_names(pipe, optimizer)[p] for g in optimizer.param_groups for p in g["params"]}
    missing = sorted(trained - found.keys())
    if missing:
        raise WeightsError(
            f"{path} has no optimizer state of {len(missing)} parameters: {', '.join(missing[:8])}"
        )
    return found


def _give_state(
    pipe: nn.Module, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]
) -> None:
    """Hand it to the optimizer, as its own `state_dict` would have it."""
    names = _names(pipe, optimizer)
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in loaded.items():
        name, slash, field = key.partition(_SLASH)
        if slash:
            by_name.setdefault(name, {})[field] = value
    groups, states, place = [], {}, 0
    for group in optimizer.param_groups:
        own = [names[parameter] for parameter in group["params"]]
        # A group of parameters that are all elsewhere keeps the settings that it has.
        settings = loaded[own[0]].value if own else {}
        groups.append({**group, **settings, "params": list(range(place, place + len(own)))})
        states.update({place + k: by_name[name] for k, name in enumerate(own) if name in by_name})
        place += len(own)
    optimizer.load_state_dict({"state": states, "param_groups": groups})
