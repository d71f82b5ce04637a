"""Checkpoints of a training run, by `torch.distributed.checkpoint`, under the original names.

    fxpipe.checkpoint.save("run/last", pipe, optimizer, {"step": step})
    if fxpipe.checkpoint.exists("run/last"):
        extra = fxpipe.checkpoint.load("run/last", pipe, optimizer)

Saved under one plan, a checkpoint is loaded under another: other stages, another schedule, more
processes or one; the plain model itself can load it too. Of a weight that several processes hold
one copy is written. A folder that a process died over is never taken for a whole checkpoint.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fxpipe.checkpoint_files import is_whole, refuse_loss, refuse_scattered, whole_metadata
from fxpipe.errors import WeightsError
from fxpipe.optimizer_state import (
    give_state,
    optimizer_state,
    refuse_other_settings,
    settings_to_load,
    state_to_load,
)
from fxpipe.outputs import filled_for, standing, whole_folder
from fxpipe.runtime.distributed.pipeline import DistributedPipeline
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.splicing import spliced_into
from fxpipe.runtime.weights import check as weights
from fxpipe.runtime.weights.original import Original, is_added


def save(
    path: str | Path,
    pipe: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: object = None,
) -> None:
    """Write weights, buffers, the optimizer's state and `extra` into the folder `path`.

    All ranks of a pipeline over processes call it together, on a file system that they share;
    `extra` is the first one's. A checkpoint that stood there stays until the new one is whole;
    anything else there is refused, for it would be lost. Raises WeightsError, alike on all.
    """
    ranks = _begin(pipe, "checkpoint.save")
    state: dict[str, Any] = {}

    def gather() -> None:
        state["model"] = dict(pipe.state_dict())
        if optimizer is not None:
            state["optimizer"] = optimizer_state(pipe, optimizer)
        if _is_first(ranks):
            state["extra"] = SimpleNamespace(value=extra)
            _, added = _divided(state["model"])
            state["added"] = SimpleNamespace(value=added)

    with _telling(ranks):
        _agree(ranks, f"{path} can't be written", gather)
        _write(Path(path), state, ranks)


def exists(path: str | Path) -> bool:
    """Whether `load` would find a checkpoint at `path`, one that `save` has finished.

    It reads what the checkpoint says of its files, not the files.
    """
    return is_whole(standing(Path(path)))


def load(path: str | Path, pipe: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Load what `save` wrote into `pipe` and `optimizer`, in place; gives `extra` back.

    Nothing is loaded unless all files are there whole, all keys and shapes fit, and the optimizer
    is of the kind that was saved, with parameters grouped as they were. Raises WeightsError, alike
    on all ranks.
    """
    ranks = _begin(pipe, "checkpoint.load")
    model, added = _divided(pipe.state_dict())
    wanted: dict[str, Any] = {"model": model, "extra": None}
    folder = standing(Path(path))
    reader = FileSystemReader(folder)

    def prepare() -> None:
        metadata = whole_metadata(folder)
        _check(metadata, model, str(path))
        if "added" in metadata.state_dict_metadata:
            wanted["added"] = None
        if optimizer is not None:
            wanted["optimizer"] = state_to_load(metadata, pipe, optimizer, str(path))

    def read(part: dict[str, Any], what: str) -> None:
        _together(ranks, what, partial(dcp_load, part, storage_reader=reader))

    with _telling(ranks):
        what = f"{path} can't be loaded"
        _agree(ranks, what, prepare)
        if optimizer is not None:
            settings = settings_to_load(pipe, optimizer)
            read({"optimizer": settings}, what)
            check = partial(refuse_other_settings, pipe, optimizer, settings)
            _agree(ranks, what, check)
        read(wanted, f"{what} whole, and some of the weights may be its own now")
        if "added" in wanted:
            added |= wanted["added"].value
        pipe.load_state_dict(model | added)
        if optimizer is not None:
            give_state(pipe, optimizer, wanted["optimizer"])
    return wanted["extra"].value


def _begin(pipe: nn.Module, work: str) -> Ranks | None:
    if not isinstance(pipe, DistributedPipeline):
        if isinstance(pipe, Original) and pipe._elsewhere:
            raise WeightsError(
                "this process holds a part of the model's weights, others the rest: save its "
                "state_dict() with torch.distributed.checkpoint, by all of them together"
            )
        if any(isinstance(each, DistributedPipeline) for each in spliced_into(pipe)):
            raise WeightsError(
                "a pipeline over processes runs a part of the model, and each process has some of "
                f"its weights: call {work}(path, pipe, optimizer) with the pipeline, which has "
                "those around it too"
            )
        return None
    pipe._ranks.progress.begin(work)
    return pipe._ranks


@contextmanager
def _telling(ranks: Ranks | None) -> Iterator[None]:
    """Let the others hear of what fails in the block, but of a WeightsError: that all have."""
    problem: WeightsError | None = None
    with nullcontext() if ranks is None else ranks.telling():
        try:
            yield
        except WeightsError as error:
            problem = error
    if problem is not None:
        raise problem


def _is_first(ranks: Ranks | None) -> bool:
    return ranks is None or ranks.world_rank == 0


def _write(path: Path, state: dict[str, Any], ranks: Ranks | None) -> None:
    """Put a checkpoint in its place. Raises WeightsError, alike on all."""
    what, filled = f"{path} can't be written", filled_for(path)
    with ExitStack() as placing:

        def make_room() -> None:
            refuse_loss(path)
            placing.enter_context(whole_folder(path))

        def put_in_place() -> None:
            refuse_scattered(filled)
            placing.close()

        _by_first(ranks, what, make_room)
        _together(ranks, what, partial(dcp_save, state, checkpoint_id=filled))
        _by_first(ranks, what, put_in_place)


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
        reasons = dict.fromkeys(f"{type(e).__name__}: {e}" for e, _ in failed[0].failures.values())
        raise WeightsError(f"{what}: {'; '.join(reasons)}") from failed[0]


def _by_first(ranks: Ranks | None, what: str, run: Callable[[], None]) -> None:
    """Let the first rank run it. Raises WeightsError, alike on all, if that fails."""
    _agree(ranks, what, run if _is_first(ranks) else lambda: None)


def _agree(ranks: Ranks | None, what: str, run: Callable[[], None]) -> None:
    """Let each rank run it. Raises WeightsError, alike on all, if that fails on any."""
    problem = None
    try:
        run()
    except (OSError, WeightsError) as error:
        problem = str(error)
    problems = [problem] if ranks is None else ranks.gather_world(problem)
    for each in problems:
        if each is not None:
            raise WeightsError(f"{what}: {each}")


def _divided(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state's weights and buffers, and what modules added to it, which may be anything.

    That is loaded whole, or not at all: `torch.distributed.checkpoint` wants each key of a dict.
    """
    added = {key: value for key, value in state.items() if is_added(key, value)}
    return {key: value for key, value in state.items() if key not in added}, added


def _check(metadata: Metadata, model: Mapping[str, Tensor], path: str) -> None:
    """Raise WeightsError unless each tensor of the model is there, with its shape."""
    sizes = {
        key.removeprefix("model."): found.size
        for key, found in metadata.state_dict_metadata.items()
        if key.startswith("model.") and not isinstance(found, BytesStorageMetadata)
    }
    given = {name: size for name, size in sizes.items() if name in model}
    shapes = {name: tensor.shape for name, tensor in model.items()}
    weights.check(shapes, given, given.__getitem__, True, path)
