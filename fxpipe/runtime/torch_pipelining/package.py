"""A package's stages for `torch.distributed.pipelining`, under its own table or another schedule.

    parts = fxpipe.to_torch_pipelining("out", batch=32)
    schedule = parts.schedule(loss_fn)
    schedule.step(x, target=y)

There neighbours alone talk: values for later stages than the next go from stage to stage. Shapes
are given beforehand, so that no forward runs to find them: batch norm would count it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from fxpipe.errors import DeviceError, FxpipeError, InputError, PackageError
from fxpipe.runtime import stream
from fxpipe.runtime.distributed.agreement import refuse_differing, refuse_unloadable
from fxpipe.runtime.distributed.device import device_of, refuse_backend, refuse_shared
from fxpipe.runtime.distributed.shared_weights import first_names, holders
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.files import Files, code_digests, read_files, read_plan, weights_of
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.relay import relayed
from fxpipe.runtime.segment import checkpoint
from fxpipe.runtime.stage import Stage
from fxpipe.runtime.torch_pipelining.crossings import (
    Crossing,
    crossings,
    reads,
    sizes_of_microbatch,
    specs,
)
from fxpipe.runtime.torch_pipelining.rules import broken_rules
from fxpipe.runtime.torch_pipelining.schedule import Ends, TableSchedule
from fxpipe.runtime.torch_pipelining.stage import StageModule, TorchStage
from fxpipe.runtime.weights.original import Original
from fxpipe.schedule import Schedule


class TorchPipelining(Original):
    """This rank's stages of a package, for `torch.distributed.pipelining`.

    `parameters`, `state_dict`, `load_state_dict`, `load_weights`, `train` and so on are of what
    these stages use, under the original model's names.
    """

    def __init__(
        self,
        manifest: Manifest,
        stages: Sequence[Stage],
        crossing: Sequence[Sequence[Crossing]],
        ends: Ends,
        group: dist.ProcessGroup | None,
        folder: Path,
        buffers: Mapping[str, Tensor],
    ) -> None:
        """`stages` are all; those of other ranks have empty modules. `crossing[j]` goes into j."""
        rank, has_eval = dist.get_rank(group), _has_eval(manifest)
        own, made = [], []
        for stage in stages:
            if stage.spec.device == rank:
                takes, gives = crossing[stage.index : stage.index + 2]
                module = StageModule(_recomputing(stage), takes, gives, has_eval)
                own.append(replace(stage, module=module))
                made.append(TorchStage(module, len(stages), _tied(manifest, stage.index), group))
        held, first = holders(manifest), first_names(manifest)
        elsewhere = frozenset(name for name in first if rank not in held[first[name]])
        super().__init__(manifest.state, own, [own[0].device], buffers, elsewhere)
        self._torch_stages = tuple(made)
        self._ends = ends
        self._table = folder / "schedule.csv"

    @property
    def stages(self) -> list[PipelineStage]:
        """The stages of this rank, in their order.

        The first of all takes the model's input tensors by position, in their order; the last
        returns its output's, each once: `output` makes the model's output of them. Each one's
        `submod` has the parameters under their original names; it may be replaced by one that
        calls it (FSDP's, torch.compile's).
        """
        return list(self._torch_stages)

    def output(self, returned: Tensor | tuple[Tensor, ...]) -> object:
        """The model's output, of what the last stage returned, as for a loss function."""
        return self._ends.output(returned)

    def schedule(self, loss_fn: LossFn | None = None) -> TableSchedule:
        """The package's schedule.csv in torch's schedule runtime: see `TableSchedule`."""
        take_buffers = self._state.take_buffers
        return TableSchedule(self.stages, self._ends, self._table, loss_fn, take_buffers)


def to_torch_pipelining(
    path: str | Path,
    device: str | torch.device | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    **sizes: int,
) -> TorchPipelining:
    """This rank's stages of the package in folder `path`, for `torch.distributed.pipelining`.

    `group` has a process for each device of the package; None is all processes, as
    `torch.distributed.init_process_group` set them up. `device` is this process's; by default that
    which the package was compiled for, of a host's GPUs the one that `LOCAL_RANK` says. `sizes`
    are named sizes of the plan, as `batch=32, length=1024`; others are as they were planned. Theirs
    fixes them: each step takes just such a batch, in micro-batches of equally many rows. `dtype` is
    that of floats between stages where it isn't the model's own (FSDP's mixed precision, autocast).
    Weights are those in the package's folder `weights`, if it has one.

    Where the plain model leaves a gradient None there may be zeros. Raises, alike on all ranks,
    PackageError with all that theirs can't do right (random numbers, a weight tied across ranks,
    shapes that depend on data) or that the package's files break, InputError, DeviceError, and
    WeightsError if one can't read its weights.
    """
    if not dist.is_initialized():
        raise InputError(
            "torch.distributed.pipelining runs in processes that know each other: start with "
            "torchrun and call torch.distributed.init_process_group() first"
        )
    folder = Path(os.path.realpath(path))
    facts = {"torch": torch.__version__, "sizes": repr(sizes), "dtype": repr(dtype)}
    facts["weights"] = str((folder / "weights").is_dir())
    planned, files = _agreed(folder, device, group, facts)
    manifest, stages = relayed(planned, files.stages, inputs_to_end=True)
    _refuse_rules(manifest, files.table)
    known = sizes_of_microbatch(manifest, sizes)
    crossing = crossings(manifest, known, dtype)
    ends = Ends(manifest, reads(manifest)[-1], (known["batch"],) * manifest.microbatches)
    parts = TorchPipelining(manifest, stages, crossing, ends, group, folder, files.buffers)
    weights = weights_of(folder, planned)
    if weights is not None:

        def gather(problem: str | None) -> list[str | None]:
            found: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, problem, group)
            return found

        refuse_unloadable(parts._load_agreed(weights, True, gather))
    return parts


def _agreed(
    folder: Path,
    device: str | torch.device | None,
    group: dist.ProcessGroup | None,
    facts: Mapping[str, str],
) -> tuple[Manifest, Files]:
    """The package, which all ranks of the group have alike, as they have `facts`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hardware, problem = None, None
    try:
        manifest = read_plan(folder)
        _refuse_size(size, len(manifest.devices))
        own = device_of(manifest, device, rank)
        if own.type == "cuda":
            # NCCL gathers objects by way of the current GPU, which else is the first on all ranks.
            torch.cuda.set_device(own)
        hardware = stream.hardware(own)
        refuse_backend(dist.get_backend_config(group), own)
        files = read_files(folder, manifest, [own] * size, rank)
    except FxpipeError as error:
        problem = str(error)
    found: list[tuple[dict[str, str], str | None, str | None]] = [({}, None, None)] * size
    dist.all_gather_object(found, ({**facts, **code_digests(folder)}, problem, hardware), group)
    refuse_differing([(its_facts, its_problem) for its_facts, its_problem, _ in found])
    refuse_shared([its_hardware for *_, its_hardware in found])
    return manifest, files


def _refuse_size(size: int, n_devices: int) -> None:
    if size != n_devices:
        raise DeviceError(
            f"the package was compiled for {n_devices} devices, the group has {size} processes: "
            f"give a group of {n_devices}, or compile with --devices {size}"
        )


def _refuse_rules(manifest: Manifest, table: Schedule) -> None:
    known = specs(manifest)
    values = {wire: known[wire] for wires in reads(manifest)[1:] for wire in wires}
    major, minor = torch.__version__.split(".")[:2]
    broken = [*broken_rules(manifest, table, values, (int(major), int(minor)))]
    if broken:
        raise PackageError(
            "\n  ".join(["torch.distributed.pipelining can't run this package:", *broken])
        )


def _has_eval(manifest: Manifest) -> bool:
    """Whether the values between stages, and what the model gives, are the same in eval mode."""
    modes = {output.mode for output in manifest.outputs}
    for stage in manifest.stages:
        modes |= {port.mode for port in stage.inputs} | {made.mode for made in stage.outputs}
    return manifest.has_eval and modes <= {"both"} and "train" not in manifest.output_structure


def _recomputing(stage: Stage) -> Stage:
    """The stage, whose backward computes it again if it was planned so.

    A stage here doesn't know which micro-batch is the last one, so that one is as well.
    """
    if stage.spec.checkpoint == "never":
        return stage
    return replace(stage, relay=partial(checkpoint, stage.relay or stage.module))


def _tied(manifest: Manifest, j: int) -> tuple[str, ...]:
    """The parameters of stage j that other stages have too."""
    first = first_names(manifest)
    others = {first[name] for k, s in enumerate(manifest.stages) if k != j for name in s.parameters}
    return tuple(name for name in manifest.stages[j].parameters if first[name] in others)
