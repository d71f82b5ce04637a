"""What all ranks must be given and asked alike, and as many of them as the package has devices."""

from collections.abc import Mapping, Sequence

from fxpipe.errors import DeviceError, InputError, PackageError, WeightsError

# How these were called the ranks tell each other by themselves: see meeting.py.
_CALLS = ("step", "evaluation")


def refuse_replicas(dps: Sequence[int], world_size: int) -> None:
    """Raise InputError unless all ranks were given the same dp, and processes for it."""
    dp = dps[0]
    for rank, other in enumerate(dps):
        if other != dp:
            raise InputError(f"rank 0 was given dp={dp}, rank {rank} dp={other}: give all the same")
    if dp < 1 or world_size % dp:
        raise InputError(
            f"dp={dp}: {world_size} processes can't be cut into so many replicas of a pipeline: "
            "start a multiple of dp"
        )


def refuse_size(size: int, dp: int, n_devices: int) -> None:
    """Raise DeviceError unless there is a process for each device of each replica."""
    if size != n_devices:
        of_each = f" in each of dp={dp} replicas" if dp > 1 else ""
        raise DeviceError(
            f"the package was compiled for {n_devices} devices, {size} processes run "
            f"it{of_each}: start {n_devices * dp} of them (torchrun --nproc-per-node "
            f"{n_devices * dp}), or compile with --devices {size}"
        )


def refuse_differing(found: Sequence[tuple[Mapping[str, object], str | None]]) -> None:
    """Raise PackageError if a rank, in order, has a problem, or other facts than the first."""
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]
    if problems:
        raise PackageError("\n".join(["the pipeline can't start:", *problems]))
    differing = [
        f"{name}: rank 0 has {found[0][0].get(name)}, rank {rank} has {other.get(name)}"
        for rank, (other, _) in enumerate(found)
        for name in {**found[0][0], **other}
        if other.get(name) != found[0][0].get(name)
    ]
    if differing:
        raise PackageError(
            "\n  ".join(["the ranks of this pipeline differ:", *differing])
            + "\ngive each the same package and the same versions"
        )


def refuse_unloadable(problems: Sequence[str | None]) -> None:
    """Raise WeightsError if a rank, in order, has a problem with weights that all were to load."""
    told = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if told and len(set(problems)) == 1:
        raise WeightsError(problems[0])
    if told:
        raise WeightsError("\n".join(["weights were loaded on no rank:", *told]))


def refuse_other_work(works: Sequence[str], first: int) -> None:
    """Raise InputError if a rank, in order from `first` on, does other work than the first one."""
    for rank, work in enumerate(works, first):
        if work != works[0] and {work, works[0]} != {*_CALLS}:
            raise InputError(
                f"rank {rank} is in {work}, rank {first} in {works[0]}: all ranks make the same "
                "calls in the same order. Give each as many batches, and call the pipeline and "
                "fxpipe.checkpoint outside of any `if` on the rank"
            )
