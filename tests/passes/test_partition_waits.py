"""Messages wait so that no device holds more than predicted, whatever the times turn out to be."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest
from chains import KIB, block, plain, random_chain
from naive_simulator import naive

from fxpipe.ir import Chain, CheckpointMode, Link, Network, Plan, Value, Wait
from fxpipe.passes.checkpoints import place, recompute_table
from fxpipe.passes.order import build
from fxpipe.passes.partition_costs import evaluate
from fxpipe.passes.partition_stages import stage_costs
from fxpipe.passes.partition_waits import with_waits
from fxpipe.schedule import Action

NETWORK = Network(Link(0.01, 1e6))


def plan_of(
    chain: Chain,
    cuts: tuple[int, ...],
    schedule: str,
    n_devices: int,
    m: int,
    mode: CheckpointMode = CheckpointMode.NEVER,
) -> Plan:
    loops = (len(cuts) + 1) // n_devices
    table = build(schedule, n_devices, m, loops=loops)
    checkpoint = place(mode, table.n_stages)
    estimate = evaluate(chain, cuts, schedule=table, checkpoint=checkpoint, network=NETWORK)
    plan = Plan(cuts, table.stage_to_device, schedule, table, checkpoint, estimate, "dp")
    return with_waits(chain, plan)


def with_workspaces(chain: Chain, random: Random) -> Chain:
    blocks = (
        replace(
            one,
            forward_workspace_bytes=random.randint(1, 20) * KIB,
            backward_workspace_bytes=random.randint(1, 30) * KIB,
        )
        for one in chain.blocks
    )
    return replace(chain, blocks=tuple(blocks))


# What stage 1 is sent is much, and gone after its forward.
LARGE = with_workspaces(plain([block("a"), block("b", forward_ms=0.8)]), Random(0))
LARGE = replace(LARGE, values=(Value("large", 100 * KIB, 0, (1,), gradient=False),))


def test_a_message_waits_where_the_one_before_leaves_no_room() -> None:
    # Stage 1 is faster than stage 0: as predicted, two messages are there at once and no more.
    plan = plan_of(LARGE, (1,), "gpipe", 2, 4)
    assert [w for w in plan.estimate.waits if w.ended.stage == 1] == [
        Wait(Action.parse("0F2"), Action.parse("1F0")),
        Wait(Action.parse("0F3"), Action.parse("1F1")),
    ]


def test_nothing_waits_where_there_is_room() -> None:
    blocks = [block("a", saved=KIB), block("b", saved=1000 * KIB)]
    plan = plan_of(with_workspaces(plain(blocks, n_bytes=8), Random(0)), (1,), "gpipe", 2, 4)
    assert not [wait for wait in plan.estimate.waits if wait.ended.stage == 1]


def test_a_device_that_is_slower_than_predicted_would_hold_more() -> None:
    plan = plan_of(LARGE, (1,), "gpipe", 2, 4)
    (ahead, behind), messages = stage_costs(LARGE, plan.cuts)
    stages = ahead, replace(behind, forward_ms=10 * behind.forward_ms)
    step = partial(naive, plan.schedule, stages, messages, NETWORK, ((False,) * 4,) * 2)
    assert step(waits=plan.estimate.waits).peak_bytes[1] == plan.estimate.peak_bytes[1]
    assert step(waits=()).peak_bytes[1] == plan.estimate.peak_bytes[1] + 2 * 100 * KIB


@pytest.mark.parametrize("mode", CheckpointMode)
@pytest.mark.parametrize(
    ("schedule", "n_devices", "n_stages"),
    [("gpipe", 3, 3), ("1f1b", 3, 3), ("zb-h1", 3, 3), ("interleaved", 2, 4), ("zb-v", 2, 4)],
)
@pytest.mark.parametrize("seed", range(4))
def test_no_device_holds_more_than_predicted(seed, schedule, n_devices, n_stages, mode) -> None:
    random = Random(seed)
    chain = with_workspaces(random_chain(random, 8, n_skips=2), random)
    given = Value("given", 0, -1, (0,), gradient=True)  # so that no half of a backward is nothing
    chain = replace(chain, values=(given, *chain.values))
    cuts = tuple(sorted(random.sample(range(1, 8), n_stages - 1)))
    plan = plan_of(chain, cuts, schedule, n_devices, 4, mode)
    stages, messages = stage_costs(chain, cuts)
    recompute = recompute_table(plan.checkpoint, 4)
    for _ in range(12):
        turned_out = [
            replace(
                one,
                forward_ms=one.forward_ms * random.choice((0.1, 1, 10)),
                backward_ms=one.backward_ms * (slower := random.choice((0.1, 1, 10))),
                weight_gradient_ms=one.weight_gradient_ms * slower,
                halving_ms=one.halving_ms * slower,
            )
            for one in stages
        ]
        given = plan.schedule, turned_out, messages, NETWORK, recompute
        held = naive(*given, waits=plan.estimate.waits).peak_bytes
        assert all(a <= b for a, b in zip(held, plan.estimate.peak_bytes, strict=True))
