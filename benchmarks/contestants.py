"""The planners that are compared, this one and its baselines, and chains of equal blocks."""

import time
from dataclasses import replace
from typing import Any

from judge import Judge, equal
from pfeife import algorithm_1

from fxpipe.chain_file import ChainFile
from fxpipe.errors import PlanError, ScheduleError
from fxpipe.ir import Block, Chain, CheckpointMode, Link, Network, Value
from fxpipe.passes import order
from fxpipe.passes.partition import partition
from fxpipe.passes.search.plan import chain_loops, search

Result = dict[str, Any]


def best_named(judge: Judge, p: int, m: int) -> Result:
    """The best of the schedules that have a name, 1 to 3 stages a device, on cuts of equal time."""
    found = []
    for name in order.NAMES:
        for loops in (1, 2, 3):
            try:
                schedule = order.build(name, p, m, loops)
            except ScheduleError:
                continue
            if schedule.n_stages <= judge.n_blocks:
                [rank] = judge.on(schedule)([equal(judge.times(), schedule.n_stages)])
                found.append((*rank, f"{name}, {loops} a device"))
    over, step_ms, name = min(found)
    return {"over_bytes": over, "step_ms": step_ms, "name": name}


def of_pfeife(judge: Judge, p: int, m: int) -> Result:
    """What algorithm 1 finds."""
    started = time.perf_counter()
    found = algorithm_1(judge, p, m)
    seconds = time.perf_counter() - started
    over, step_ms = found.rank
    return {"over_bytes": over, "step_ms": step_ms, "name": found.name, "seconds": seconds}


def of_ours(
    file: ChainFile,
    p: int,
    m: int,
    time_limit_s: float,
    *,
    loops: tuple[int, ...] = (),
    recompute: bool = False,
    capacity_bytes: int | None = None,
) -> Result:
    """What `auto` finds, and the bound that it gives."""
    started = time.perf_counter()
    capacity = file.capacity_bytes if capacity_bytes is None else capacity_bytes
    try:
        plan = search(
            file.chain,
            n_devices=p,
            n_microbatches=m,
            network=file.network,
            capacity_bytes=(capacity,) * p,
            training_factor=file.training_factor,
            recompute=recompute,
            loops=loops or chain_loops(p),
            time_limit_s=time_limit_s,
        )
    except PlanError as error:
        return {"over_bytes": 1, "name": str(error), "seconds": time.perf_counter() - started}
    return {
        "over_bytes": 0,
        "step_ms": plan.estimate.step_ms,
        "bound_ms": plan.bound_ms,
        "name": f"{len(plan.cuts) + 1} stages",
        "peak_bytes": max(plan.estimate.peak_bytes),
        "seconds": time.perf_counter() - started,
    }


def uniform(n_blocks: int, capacity_bytes: int) -> ChainFile:
    """Blocks whose F, I and W take 10 ms each, each of which saves one byte; messages are free."""
    block = Block(("block",), 10.0, 20.0, saved=(("saved", 1),), weight_gradient_ms=10.0)
    blocks = tuple(replace(block, saved=((f"saved {k}", 1),)) for k in range(n_blocks))
    values = [Value("input", 0, -1, (0,), gradient=True)]
    values += [Value(f"output {k}", 0, k, (k + 1,), gradient=True) for k in range(n_blocks - 1)]
    chain = Chain(blocks, tuple(values), (True,) * n_blocks)
    return ChainFile(chain, capacity_bytes, 0.0, Network(Link(0.0, 1.0)))


def best_of_modes(file: ChainFile, p: int, m: int, capacity_bytes: int) -> tuple[float, str] | None:
    """The best plan at a memory limit if all of a stage is recomputed, or nothing: ms and name.

    Each named schedule, 1 to 3 stages a device, with each of always, except_last and never for all
    stages, cut by dynamic programming at this limit; None where nothing fits.
    """
    found = []
    for name in order.NAMES:
        for loops in (1, 2, 3):
            for mode in CheckpointMode:
                try:
                    plan = partition(
                        file.chain,
                        n_stages=p * loops,
                        n_microbatches=m,
                        schedule=name,
                        checkpoint=mode,
                        network=file.network,
                        capacity_bytes=(capacity_bytes,) * p,
                        solver="dp",
                        loops=loops,
                        training_factor=file.training_factor,
                    )
                except (PlanError, ScheduleError):
                    continue
                found.append((plan.estimate.step_ms, f"{name}, {loops} a device, {mode}"))
    return min(found, default=None)
