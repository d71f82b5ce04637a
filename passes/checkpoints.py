"""Checkpoint placement: which stages recompute which micro-batches in backward, and which parts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fxpipe.errors import PlanError
from fxpipe.ir import Chain, CheckpointMode, Plan, Value

Segments = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """What a stage's segments change, for one micro-batch.

    `kept_bytes` are there from the forward to the end of the backward, `again_bytes` more for a
    part of the backward, which `again_ms` is added to. Between the halves of a backward, what all
    segments computed again is there, `all_again_bytes`.
    """

    kept_bytes: int
    again_bytes: int
    all_again_bytes: int
    again_ms: float


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


def with_segments(plan: Plan, chain: Chain, segments: Sequence[Segments]) -> Plan:
    """The plan with `segments` of each stage, which are runs [begin, end) of the chain's blocks.

    Its estimate is as it was. Raises PlanError where they are not within the stage, in order and
    apart, or where the stage is recomputed whole.
    """
    bounds = [*pairwise([0, *plan.cuts, len(chain.blocks)])]
    if len(segments) != len(bounds):
        raise PlanError(f"segments of {len(segments)} stages, but the plan has {len(bounds)}")
    for j, (own, (begin, end)) in enumerate(zip(segments, bounds, strict=True)):
        places = [begin, *(place for segment in own for place in segment), end]
        if places != sorted(places) or any(first >= last for first, last in own):
            raise PlanError(
                f"stage {j} has blocks {begin} to {end}, which the segments {list(own)} don't fit: "
                "give runs of them, in order"
            )
        if own and plan.checkpoint[j] is not CheckpointMode.NEVER:
            raise PlanError(
                f"stage {j} is recomputed whole ({plan.checkpoint[j]}): give it segments or that"
            )
    return replace(plan, segments=tuple(tuple(own) for own in segments))


def segment_cost(chain: Chain, begin: int, end: int, segments: Segments) -> SegmentCost:
    """What the stage of blocks [begin, end) keeps, and computes again, with these segments.

    A segment keeps its inputs. Its own tensors come when the backward reaches it and are gone
    before the next segment's come, so that the largest one's count. Parameters and what the stage
    receives are left out.
    """
    received = {v.memory for v in chain.values if v.producer < begin and _reads(v, begin, end)}
    sizes = {v.name: v.bytes for v in chain.values}
    inputs = {
        v.memory: max(v.bytes, sizes.get(v.memory, 0))
        for v in chain.values
        if any(begin <= v.producer < first and _reads(v, first, last) for first, last in segments)
    }
    recomputed = {k for first, last in segments for k in range(first, last)}
    kept = inputs | _saved(chain, (k for k in range(begin, end) if k not in recomputed))
    again = [_saved(chain, range(first, last)) for first, last in segments]
    present = received | kept.keys()
    added = [sum(size for name, size in one.items() if name not in present) for one in again]
    return SegmentCost(
        kept_bytes=sum(size for name, size in kept.items() if name not in received),
        again_bytes=max(added, default=0),
        all_again_bytes=sum(added),
        again_ms=sum(chain.blocks[k].forward_ms for k in recomputed),
    )


def _reads(value: Value, begin: int, end: int) -> bool:
    return any(begin <= k < end for k in value.consumers)


def _saved(chain: Chain, blocks: Iterable[int]) -> dict[str, int]:
    return dict(one for k in blocks for one in chain.blocks[k].saved)
