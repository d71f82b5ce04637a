"""Checkpoint placement: which stages recompute which micro-batches in backward."""

from fxpipe.ir import CheckpointMode


def place(mode: CheckpointMode, n_stages: int) -> tuple[CheckpointMode, ...]:
    """The mode of each stage. All stages get the same one, as in torchgpipe."""
    return (mode,) * n_stages


def recomputes(mode: CheckpointMode, microbatch: int, n_microbatches: int) -> bool:
    """Whether a stage of this mode runs the forward of `microbatch` again before its backward.

    `except_last` keeps the last micro-batch's activations, because its backward comes at once
    (torchgpipe, arXiv 2004.09910, section 2.1).
    """
    if mode is CheckpointMode.EXCEPT_LAST:
        return microbatch < n_microbatches - 1
    return mode is CheckpointMode.ALWAYS


def recompute_table(
    modes: tuple[CheckpointMode, ...], n_microbatches: int
) -> tuple[tuple[bool, ...], ...]:
    """For each stage, for each micro-batch: is it recomputed? The form that `simulate` takes."""
    return tuple(
        tuple(recomputes(mode, i, n_microbatches) for i in range(n_microbatches)) for mode in modes
    )
