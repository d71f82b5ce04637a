"""CP-SAT's own order of actions: the best there is, in the memory there is."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from random import Random

import pytest

from fxpipe.ir import Link, Network
from fxpipe.passes import order
from fxpipe.passes.order_cpsat import solve
from fxpipe.passes.order_problem import OrderProblem
from fxpipe.passes.simulate_costs import Message, StageCost
from fxpipe.schedule import Action, Kind, Schedule, clock_order
from fxpipe.schedule_check import check

FREE = Network(Link(latency_ms=0.0, bytes_per_ms=float("inf")))


def uniform(p: int, m: int, in_flight: int) -> OrderProblem:
    """F, I and W take 10 ms each on one stage a device, which holds so many micro-batches."""
    cost = StageCost(10.0, 20.0, saved_bytes=100, weight_gradient_ms=10.0)
    never = ((False,) * m,) * p
    return OrderProblem((cost,) * p, (), FREE, tuple(range(p)), (100 * in_flight,) * p, never)


def uneven(random: Random, n_bytes: int, capacity_bytes: int = 1000) -> OrderProblem:
    """Two stages on two devices, two micro-batches, messages of so many bytes."""
    stages = []
    for _ in range(2):
        forward_ms, input_ms, weight_ms = (random.randint(1, 9) for _ in range(3))
        saved_bytes, workspace_bytes = random.randint(10, 20), random.randint(0, 5)
        stages.append(
            StageCost(
                forward_ms,
                input_ms + weight_ms,
                saved_bytes=saved_bytes,
                forward_workspace_bytes=workspace_bytes,
                backward_workspace_bytes=workspace_bytes,
                weight_gradient_ms=weight_ms,
            )
        )
    network = Network(Link(latency_ms=0.5, bytes_per_ms=2.0)) if n_bytes else FREE
    return OrderProblem(
        tuple(stages),
        (Message(0, 1, n_bytes, n_bytes),) if n_bytes else (),
        network,
        (0, 1),
        (capacity_bytes,) * 2,
        ((False, False),) * 2,
    )


def rows(problem: OrderProblem, stage: int) -> Iterator[tuple[Action, ...]]:
    """Each order of the actions of two micro-batches, the first of which is begun first."""
    first, second = (problem.actions(stage, i) for i in range(2))
    n = len(first) + len(second)
    for others in combinations(range(1, n), len(first) - 1):
        places = {0, *others}
        queues = iter(first), iter(second)
        yield tuple(next(queues[k not in places]) for k in range(n))


def best_of_all(problem: OrderProblem) -> tuple[int, float]:
    """Bytes over, and step, of the best order there is."""
    tables = (Schedule(both) for both in product(rows(problem, 0), rows(problem, 1)))
    n = sum(len(problem.actions(j, i)) for j, i in product(range(2), repeat=2))
    return min(problem.rank(table) for table in tables if len(clock_order(table)) == n)


def test_a_forward_holds_what_stays_on_its_device_and_copies_to_be_run_again() -> None:
    cost = StageCost(1.0, 1.0, saved_bytes=100, input_bytes=1, written_bytes=10)
    message = Message(0, 1, 5, 5, handed_bytes=1000)
    again = ((False,), (True,))
    held = [
        [
            OrderProblem((cost,) * 2, (message,), FREE, devices, (2000, 2000), again).held_bytes(
                Action(j, Kind.FORWARD, 0)
            )
            for j in (0, 1)
        ]
        for devices in ((0, 0), (0, 1))
    ]
    assert held == [[1101, 11], [101, 11]]


def test_what_waits_is_there_until_the_second_half() -> None:
    cost = StageCost(1.0, 1.0, again_bytes=100, arriving_bytes=5)
    problem = OrderProblem((cost,), (), FREE, (0,), (2000,), ((False,),))
    assert problem.held_bytes(Action(0, Kind.INPUT, 0)) == 105


@pytest.mark.parametrize("hint", ["1f1b", "zb-h1"])
def test_a_step_of_270_in_the_memory_of_1f1b(hint: str) -> None:
    problem = uniform(4, 8, in_flight=4)
    found, bound_ms = solve(problem, hint=order.build(hint, 4, 8), seed=0, time_limit_s=60)
    check(found, problem.devices, 8, dict.fromkeys(range(4), "buffer"))
    assert problem.rank(found) == (0, 270.0)
    assert bound_ms == 270.0


@pytest.mark.parametrize("n_bytes", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_no_order_is_better(seed: int, n_bytes: int) -> None:
    problem = uneven(Random(seed), n_bytes)
    found, bound_ms = solve(problem, hint=order.build("gpipe", 2, 2), seed=0, time_limit_s=60)
    best = best_of_all(problem)
    assert problem.rank(found) == best
    assert best[1] * (1 - 1e-2) <= bound_ms <= best[1]


@pytest.mark.parametrize("seed", range(3))
def test_no_order_is_better_where_only_one_micro_batch_fits(seed: int) -> None:
    problem = uneven(Random(seed), 0, capacity_bytes=25)
    hint = order.build("gpipe", 2, 2)  # more than fits
    found, bound_ms = solve(problem, hint=hint, seed=0, time_limit_s=60)
    best = best_of_all(problem)
    assert problem.rank(hint) > (0, 1000.0)
    assert problem.rank(found) == best
    assert bound_ms <= best[1]


@pytest.mark.parametrize("whole", [(), ((0, 0), (1, 0)), tuple(product(range(2), repeat=2))])
@pytest.mark.parametrize("seed", range(4))
def test_no_order_is_better_of_a_models_stages(
    seed: int, whole: tuple[tuple[int, int], ...]
) -> None:
    random = Random(seed)
    problem = uneven(random, 8)
    costs = (
        replace(
            cost,
            input_bytes=random.randint(0, 5),
            halving_ms=random.choice([0.0, 1.5]),
            arriving_bytes=random.randint(0, 9),
            passing_bytes=random.choice([0, 8]) * j,
            again_bytes=random.randint(0, 5),
            again_ms=random.choice([0.0, 1.0]),
        )
        for j, cost in enumerate(problem.stages)
    )
    link = Link(latency_ms=0.5, bytes_per_ms=2.0, value_ms=0.3, byte_ms=0.1)
    problem = replace(
        problem,
        stages=tuple(costs),
        network=Network(link),
        whole=frozenset(whole),
    )
    one_by_one = Schedule(
        tuple(tuple(action for i in range(2) for action in problem.actions(j, i)) for j in range(2))
    )
    room = tuple(size + random.randint(0, 15) for size in problem.simulate(one_by_one).peak_bytes)
    problem = replace(problem, capacity_bytes=room)
    best = best_of_all(problem)

    found, bound_ms = solve(problem, hint=one_by_one, seed=0, time_limit_s=60, n_workers=2)

    assert best[0] == 0
    assert problem.rank(found)[0] == 0
    assert problem.rank(found)[1] <= best[1] * (1 + 1e-3)
    assert bound_ms <= best[1]


def test_the_answer_is_the_same_again() -> None:
    problem = uniform(3, 4, in_flight=2)
    hint = order.build("gpipe", 3, 4)
    first, second = (solve(problem, hint=hint, seed=1, time_limit_s=60) for _ in range(2))
    assert first == second
    assert problem.rank(first[0])[0] == 0


def test_what_is_recomputed_is_saved_late_and_takes_longer() -> None:
    problem = replace(uniform(2, 4, in_flight=1), recompute=((True,) * 4, (False,) * 4))
    hint = order.build("gpipe", 2, 4)
    found, bound_ms = solve(problem, hint=hint, seed=0, time_limit_s=60)
    over, step_ms = problem.rank(found)
    assert (over, step_ms) == (0, bound_ms)
    assert [a.microbatch for a in found.rows[1] if a.kind is Kind.FORWARD] == [0, 1, 2, 3]


def test_stages_in_the_shape_of_a_v_go_as_fast_as_zb_v() -> None:
    cost = StageCost(5.0, 10.0, saved_bytes=50, weight_gradient_ms=5.0)
    v = order.build("zb-v", 2, 4, 2)
    problem = OrderProblem(
        (cost,) * 4, (), FREE, v.stage_to_device, (200, 200), ((False,) * 4,) * 4
    )
    serial = Schedule(
        tuple(
            tuple(
                Action(j, kind, i)
                for i in range(4)
                for kind, stages in ((Kind.FORWARD, held), (Kind.BACKWARD, held[::-1]))
                for j in stages
            )
            for held in ((0, 3), (1, 2))
        )
    )
    found, bound_ms = solve(problem, hint=serial, seed=0, time_limit_s=60)
    assert problem.rank(found) == problem.rank(v) == (0, 125.0)
    assert bound_ms == 125.0
