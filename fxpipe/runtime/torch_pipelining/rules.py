"""What `torch.distributed.pipelining` can't do right with a package, each with the way out."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from fxpipe.runtime.distributed.shared_weights import first_names, holders
from fxpipe.runtime.manifest import Manifest, TensorSpec
from fxpipe.runtime.portal import Wire
from fxpipe.schedule import Schedule

_OURS = "train with fxpipe.load(..., distributed=True)"


def broken_rules(
    manifest: Manifest, table: Schedule, values: Mapping[Wire, TensorSpec], torch: tuple[int, int]
) -> Iterator[str]:
    """What is wrong with a package whose stages send each other `values`, under torch `torch`."""
    empty = [rank for rank, row in enumerate(table.rows) if not row]
    if empty:
        yield f"{_named('rank', empty)} without a stage: compile for fewer devices"
    random = [j for j, stage in enumerate(manifest.stages) if stage.random]
    if random:
        yield (
            f"random numbers in {_named('stage', random)}: theirs are each rank's own, so that "
            "they depend on the stages and the schedule. Compile the model with its dropout at 0, "
            f"or {_OURS}"
        )
    yield from _ties(manifest)
    for wire, spec in values.items():
        if spec.of_data:
            yield f"the shape of {_sent(wire, spec)} depends on data, theirs are fixed: {_OURS}"
    yield from _of_old_torch(manifest, table, values, torch)


def _ties(manifest: Manifest) -> Iterator[str]:
    first = first_names(manifest)
    kinds = {spec.name: spec.kind for spec in manifest.state}
    for name, ranks in holders(manifest).items():
        if len(ranks) > 1 and kinds[name] == "parameter":
            stages = [
                j
                for j, stage in enumerate(manifest.stages)
                if name in (first[held] for held in stage.parameters)
            ]
            yield (
                f"{name} in {_named('stage', stages)} on {_named('rank', sorted(ranks))}: theirs "
                "would train a copy on each. Compile so that these stages share a device "
                "(--schedule zb-v puts the first and the last on one), untie it in the model, or "
                f"{_OURS}"
            )


def _of_old_torch(
    manifest: Manifest, table: Schedule, values: Mapping[Wire, TensorSpec], torch: tuple[int, int]
) -> Iterator[str]:
    """What newer versions do right."""
    version = f"torch {torch[0]}.{torch[1]}"
    if torch < (2, 13):
        end = len(manifest.stages) - 1
        for wire, spec in values.items():
            if wire.source < end and not spec.requires_grad:
                yield (
                    f"{_sent(wire, spec)} has no gradient, and {version} wants one of all that "
                    f"stages send each other: install torch 2.13 or newer, or {_OURS}"
                )
        if table.split:
            j, i = min(table.split)
            # pytorch#180952
            yield (
                f"{j}I{i} and {j}W{i}: {version} counts the gradient of a weight that is used "
                "twice more than once where a backward is in two: install torch 2.13 or newer, "
                f"compile with --schedule 1f1b, or {_OURS}"
            )
    if torch < (2, 12):
        for j, (rank, after) in enumerate(pairwise(manifest.stage_to_device)):
            if rank == after:
                yield (
                    f"stages {j} and {j + 1} are both on rank {rank}, and {version} sends itself "
                    "a message there, which gloo can't: install torch 2.12 or newer, compile with "
                    f"--schedule 1f1b or interleaved, or {_OURS}"
                )


def _sent(wire: Wire, spec: TensorSpec) -> str:
    return f"{wire.value.partition(' of ')[0]} {spec} after stage {wire.source}"


def _named(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
