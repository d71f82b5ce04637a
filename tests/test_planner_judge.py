"""The judge of the planner's baselines says what the simulator says."""

from pathlib import Path

import pytest

from fxpipe.chain_file import ChainFile
from fxpipe.ir import Block, Chain, CheckpointMode, Link, Network, Value
from fxpipe.passes import order
from fxpipe.passes.checkpoints import place
from fxpipe.passes.partition_costs import evaluate


def test_the_judge_of_baselines_says_what_the_simulator_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    from judge import Judge

    blocks = tuple(
        Block((f"b{k}",), 1.0 + k, 2.0 + k, saved=((f"saved {k}", 10),), weight_gradient_ms=1.0)
        for k in range(4)
    )
    values = tuple(Value(f"v{k}", 5, k, (k + 1,), gradient=True) for k in range(3))
    file = ChainFile(Chain(blocks, values, (True,) * 4), 60, 0.0, Network(Link(0.5, 10.0)))
    table = order.build("zb-h1", 2, 3)

    [(over, step_ms)] = Judge(file).on(table)([(2,)])

    checkpoint = place(CheckpointMode.NEVER, 2)
    expected = evaluate(
        file.chain, (2,), schedule=table, checkpoint=checkpoint, network=file.network
    )
    assert step_ms == pytest.approx(expected.step_ms)
    assert over == sum(max(0, peak - 60) for peak in expected.peak_bytes)
