"""Chains made by hand or at random, and all ways to cut a small one."""

from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

from fxpipe.ir import Block, Chain, CheckpointMode, Network, Value
from fxpipe.passes.checkpoints import place
from fxpipe.passes.order import build
from fxpipe.passes.partition_costs import evaluate
from fxpipe.schedule import Schedule

KIB = 1024


def block(
    name: str,
    forward_ms: float = 1.0,
    backward_ms: float = 2.0,
    saved: int = 0,
    parameters: int = 0,
    weight_gradient_ms: float = 0.0,
    halving_ms: float = 0.0,
) -> Block:
    """A block of one op with storages of its own."""
    return Block(
        ops=(name,),
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        saved=((f"{name}.saved", saved),),
        parameters=((f"{name}.weight", parameters),),
        weight_gradient_ms=weight_gradient_ms,
        halving_ms=halving_ms,
    )


def plain(blocks: list[Block], n_bytes: int = 1000) -> Chain:
    """Each block hands one value to the next; the last one's is the model's output."""
    values = [Value(f"v{k}", n_bytes, k, (k + 1,), gradient=True) for k in range(len(blocks))]
    return Chain(tuple(blocks), tuple(values), (True,) * len(blocks))


def halved_slowly(chain: Chain, random: Random) -> Chain:
    """The same, where backwards in halves take longer, and each action some time besides.

    Some forwards write buffers.
    """
    blocks = (
        replace(
            one, halving_ms=random.choice((0.0, 0.1)), written_bytes=random.choice((0, 9 * KIB))
        )
        for one in chain.blocks
    )
    return replace(chain, blocks=tuple(blocks), action_ms=random.choice((0.0, 0.05)))


def random_chain(random: Random, n_blocks: int, n_skips: int = 0) -> Chain:
    """Uneven blocks, messages of several sizes, a place in ten where no cut may be."""
    blocks = []
    for k in range(n_blocks):
        forward = random.uniform(0.1, random.choice([1.0, 4.0]))
        blocks.append(
            block(
                f"b{k}",
                forward,
                forward * random.uniform(1, 3),
                saved=random.randint(1, 50) * KIB,
                parameters=random.randint(0, 20) * KIB,
                weight_gradient_ms=forward * random.random(),
            )
        )
    values = [
        Value(f"v{k}", random.randint(1, 10) * 1000, k, (k + 1,), gradient=True)
        for k in range(n_blocks)
    ]
    for k in range(n_skips):
        first, last = sorted(random.sample(range(n_blocks), 2))
        size = random.randint(1, 10) * 1000
        values.append(Value(f"skip{k}", size, first, (last,), gradient=random.random() < 0.5))
    cuttable = (*(random.random() < 0.9 for _ in range(n_blocks - 1)), True)
    return Chain(tuple(blocks), tuple(values), cuttable)


def every_plan(
    chain: Chain,
    *,
    n_stages: int,
    n_microbatches: int,
    schedule: str | Schedule,
    checkpoint: CheckpointMode,
    network: Network,
    capacity_bytes: tuple[int, ...],
    loops: int = 1,
) -> list[tuple[float, int]]:
    """Step and highest peak of each way to cut the chain that fits, the shortest step first."""
    places = [k + 1 for k in range(len(chain.blocks) - 1) if chain.cuttable[k]]
    table = schedule
    if isinstance(schedule, str):
        table = build(schedule, n_stages // loops, n_microbatches, loops)
    modes = place(checkpoint, n_stages)
    estimates = (
        evaluate(chain, cuts, schedule=table, checkpoint=modes, network=network)
        for cuts in combinations(places, n_stages - 1)
    )
    plans = ((one.step_ms, max(one.peak_bytes)) for one in estimates)
    return sorted((step, peak) for step, peak in plans if peak <= min(capacity_bytes))


def between(chain: Chain, asked: dict[str, Any]) -> tuple[int, ...]:
    """Capacities between what the shortest step and what the least memory needs."""
    peaks = [peak for _, peak in every_plan(chain, **asked)]
    return ((min(peaks) + peaks[0]) // 2,) * len(asked["capacity_bytes"])
