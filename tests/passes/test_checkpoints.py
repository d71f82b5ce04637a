"""torchgpipe's three modes, as a row of micro-batches: r recomputed, - kept; and segments."""

from dataclasses import replace

import pytest
from chains import block, plain

from fxpipe.errors import PlanError
from fxpipe.ir import Chain, CheckpointMode, Estimate, Plan, Value
from fxpipe.passes.checkpoints import (
    SegmentCost,
    place,
    recompute_table,
    recomputes,
    segment_cost,
    with_segments,
)
from fxpipe.passes.order import build


@pytest.mark.parametrize(
    ("mode", "microbatches"), [("never", "----"), ("except_last", "rrr-"), ("always", "rrrr")]
)
def test_modes(mode: str, microbatches: str) -> None:
    row = [recomputes(CheckpointMode(mode), i, 4) for i in range(4)]

    assert "".join("r" if again else "-" for again in row) == microbatches


def test_every_stage_gets_the_mode() -> None:
    assert place(CheckpointMode.ALWAYS, 3) == (CheckpointMode.ALWAYS,) * 3


def test_the_table_has_a_row_for_each_stage() -> None:
    modes = (CheckpointMode.EXCEPT_LAST, CheckpointMode.NEVER)

    assert recompute_table(modes, 2) == ((True, False), (False, False))


@pytest.fixture
def chain() -> Chain:
    """Six blocks that keep 10, 20, ... bytes and hand on 1, 2, ..."""
    blocks = [block(f"b{k}", forward_ms=k + 1.0, saved=10 * (k + 1)) for k in range(6)]
    values = [Value(f"v{k}", k + 1, k, (k + 1,), gradient=True) for k in range(6)]
    return replace(plain(blocks), values=tuple(values))


@pytest.mark.parametrize(
    ("segments", "cost"),
    [
        ([], SegmentCost(20 + 30 + 40 + 50, 0, 0, 0)),
        ([(2, 4)], SegmentCost(20 + 50 + 2, 30 + 40, 30 + 40, 3 + 4)),
        ([(2, 3), (3, 4)], SegmentCost(20 + 50 + 2 + 3, 40, 30 + 40, 3 + 4)),
        ([(1, 5)], SegmentCost(0, 140, 140, 2 + 3 + 4 + 5)),  # its input is received
        ([(1, 2), (3, 5)], SegmentCost(30 + 3, 40 + 50, 20 + 40 + 50, 2 + 4 + 5)),
    ],
    ids=str,
)
def test_a_segment_keeps_its_inputs_and_the_largest_comes_back(chain, segments, cost):
    assert segment_cost(chain, 1, 5, segments) == cost


def test_a_storage_counts_once_whoever_keeps_it(chain):
    # Block 2 keeps its own input, and so does block 4 what the stage received.
    blocks = [*chain.blocks]
    blocks[2] = replace(blocks[2], saved=(("v1", 2), ("x", 5)))
    blocks[4] = replace(blocks[4], saved=(("v0", 1), ("x", 5)))
    chain = replace(chain, blocks=tuple(blocks))

    assert segment_cost(chain, 1, 5, []).kept_bytes == 20 + (2 + 5) + 40
    assert segment_cost(chain, 1, 5, [(2, 3)]) == SegmentCost(20 + 2 + 40 + 5, 0, 0, 3)
    assert segment_cost(chain, 1, 5, [(2, 5)]) == SegmentCost(20 + 2, 40 + 5, 40 + 5, 3 + 4 + 5)


def test_a_value_that_skips_into_a_segment_is_kept(chain):
    chain = replace(chain, values=(*chain.values, Value("skip", 100, 1, (4,), gradient=True)))

    assert segment_cost(chain, 1, 5, [(3, 5)]).kept_bytes == 20 + 30 + 3 + 100
    assert segment_cost(chain, 1, 5, [(1, 5)]).kept_bytes == 0
    assert segment_cost(chain, 2, 5, [(3, 5)]).kept_bytes == 30 + 3  # it is received


def plan(*modes: str) -> Plan:
    """Two stages of three blocks each."""
    table = build("1f1b", 2, 2, 1)
    checkpoint = tuple(map(CheckpointMode, modes))
    return Plan((3,), (0, 1), "1f1b", table, checkpoint, Estimate(0, 0, (), (), ()), "dp")


def test_a_plan_is_given_segments(chain):
    assert with_segments(plan("never", "never"), chain, [[(1, 3)], []]).segments == (((1, 3),), ())


@pytest.mark.parametrize(
    ("modes", "segments", "message"),
    [
        (("never", "never"), [[(2, 4)], []], "stage 0 has blocks 0 to 3"),
        (("never", "never"), [[], [(4, 5), (3, 4)]], "in order"),
        (("never", "never"), [[(1, 1)], []], "stage 0 has blocks 0 to 3"),
        (("never", "never"), [[]], "segments of 1 stages, but the plan has 2"),
        (("never", "always"), [[], [(3, 4)]], r"stage 1 is recomputed whole \(always\)"),
    ],
    ids=str,
)
def test_segments_that_are_not_of_their_stage_are_refused(chain, modes, segments, message):
    with pytest.raises(PlanError, match=message):
        with_segments(plan(*modes), chain, segments)


def test_a_segment_that_reads_a_view_keeps_all_of_its_memory(chain: Chain) -> None:
    view = Value("view", 7, 2, (4,), gradient=True, view_of="v1")
    large = replace(chain.values[1], bytes=200)
    viewed = replace(chain, values=(chain.values[0], large, *chain.values[2:], view))

    assert segment_cost(viewed, 1, 5, [(4, 5)]).kept_bytes == 20 + 30 + 40 + 4 + 200
