"""What `fxpipe plan` prints of a plan whose stages are computed again whole."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from fxpipe.ir import Block, Chain, CheckpointMode, Link, Network, Value
from fxpipe.planned import planned
from fxpipe.planner import Answer
from fxpipe.question import Question
from fxpipe.settings import table_of
from fxpipe.show.plan import plan_json, plan_table

CHAIN = Chain(
    tuple(Block((f"b{k}",), 1.0, 2.0, saved=((f"s{k}", 8),)) for k in range(4)),
    tuple(Value(f"v{k}", 1, k, (k + 1,), gradient=True) for k in range(4)),
    (True,) * 4,
)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (CheckpointMode.ALWAYS, "blocks 2 to 3, computes again 2 to 3\n"),
        (CheckpointMode.EXCEPT_LAST, "computes again 2 to 3, of all micro-batches but the last\n"),
    ],
)
def test_what_whole_stages_compute_again_is_told(mode: CheckpointMode, text: str) -> None:
    asked = Question(CHAIN, 2, 4, Network(Link(0.0, 1e9)), (1000,) * 2, 0.0, "auto")
    plan = planned(replace(asked, checkpoint=mode), "1f1b", table_of("1f1b", 2, 4, None))
    answer = Answer("1f1b", plan, "", 1.0)

    facts = plan_json(asked, answer, [answer], None)
    assert (facts["recomputed"], facts["recompute_ms"]) == ([[[0, 2]], [[2, 4]]], 4.0)
    (other,) = facts["candidates"]
    assert (other["recomputed"], other["checkpoint"]) == ([[[0, 2]], [[2, 4]]], mode)
    assert facts["checkpoint"] == mode
    out = io.StringIO()
    Console(file=out, width=100).print(plan_table(asked, answer, [], None))
    assert text in out.getvalue()
    assert "computing again adds 4.00 ms to a micro-batch" in out.getvalue()
