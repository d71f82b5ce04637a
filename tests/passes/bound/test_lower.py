"""The bound of every plan: each of its reasons by hand, and against the best plan there is."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random

import numpy as np
import pytest
from chains import block, plain

from fxpipe.ir import Block, Chain, Link, Network, Value
from fxpipe.passes import order
from fxpipe.passes.bound.atoms import atoms_of
from fxpipe.passes.bound.flow import following_ms
from fxpipe.passes.bound.lower import bytes_free, lower_bound_ms
from fxpipe.passes.bound.pace import pace_ms
from fxpipe.passes.order_cpsat import solve
from fxpipe.passes.order_problem import OrderProblem
from fxpipe.passes.partition_stages import stage_costs
from fxpipe.passes.search.judge import Candidate, Judge, SearchProblem
from fxpipe.schedule import Action, Kind, Schedule

FREE = Network(Link(0.0, 1e30))


def equal(n: int, ms: float = 1.0, n_bytes: int = 0) -> Chain:
    """Blocks whose F, I and W take as long and that save a byte."""
    blocks = [block(f"b{k}", ms, 2 * ms, saved=1, weight_gradient_ms=ms) for k in range(n)]
    return plain(blocks, n_bytes)


def bound(chain: Chain, p: int, m: int, network: Network = FREE, free: int | None = None) -> float:
    return lower_bound_ms(chain, edges(chain), p, m, network, free)


def edges(chain: Chain) -> tuple[int, ...]:
    return tuple(range(len(chain.blocks) + 1))


def test_work_heads_and_the_way_there_and_back() -> None:
    chain = equal(8, 0.5)
    shorter = replace(chain.blocks[7], backward_ms=0.9375)

    # 95.5 ms of work, and the second device waits for a forward.
    assert bound(plain([*chain.blocks[:7], shorter]), 2, 8) == pytest.approx((95.5 + 0.5) / 2)
    # One micro-batch goes there and back.
    assert bound(chain, 4, 1) == pytest.approx(4 + 4 + 0.5)
    # One device does it all.
    assert bound(chain, 1, 8) == pytest.approx(96)


def test_a_block_is_one_devices() -> None:
    # Of eight blocks of 12 ms one device has three, or the last to begin has two.
    assert bound(equal(8, 0.5), 4, 8) == pytest.approx(1.5 + 2 * 12)
    # Of nine blocks one has three, and the first can.
    assert bound(equal(9, 0.5), 4, 8) == pytest.approx(3 * 12)

    blocks = equal(9, 0.5).blocks
    shorter = replace(blocks[0], backward_ms=0.75)
    # None of them is shorter than 10 ms.
    assert bound(plain([shorter, *blocks[1:]]), 4, 8) == pytest.approx(3 * 10)


def test_a_long_block_keeps_its_device_busy_between_what_is_before_and_after() -> None:
    chain = equal(8, 0.5)
    at_end = replace(chain.blocks[7], backward_ms=19.5)
    at_begin = replace(chain.blocks[0], backward_ms=19.5)

    # Its eight F, I and W come after the forwards of seven blocks,
    assert bound(replace(chain, blocks=(*chain.blocks[:7], at_end)), 4, 8) == pytest.approx(
        3.5 + 8 * 20
    )
    # and its eight I and W after all forwards and the backwards of seven blocks.
    assert bound(replace(chain, blocks=(at_begin, *chain.blocks[1:])), 4, 8) == pytest.approx(
        4 + 3.5 + 8 * 19.5
    )


def test_as_many_micro_batches_as_devices_wait_at_the_turn() -> None:
    # Where the first of two blocks is begun for the last time, its device waits for two actions.
    assert bound(equal(2), 2, 2) == pytest.approx((2 * 6 + 2) / 2)


def test_devices_wait_for_micro_batches_that_begin_one_after_another() -> None:
    chain = equal(33, 0.5)
    first = replace(chain.blocks[0], forward_ms=4.0, backward_ms=0.0, weight_gradient_ms=0.0)
    slow = replace(chain, blocks=(first, *chain.blocks[1:]))

    # The second device waits for one begun micro-batch, the fourth for three.
    assert following_ms(atoms_of(slow, edges(slow), FREE), 4, 8) == pytest.approx(4 + 8 + 12)
    assert bound(slow, 4, 8) >= (8 * 52 + 4 + 8 + 12) / 4 * (1 - 1e-9)
    # Of two there is never a third; the forward of one takes 20 ms.
    assert bound(slow, 4, 2) >= (2 * 52 + 4 + 20 + 20) / 4


def test_a_long_last_block_has_to_come_back_before_all_others() -> None:
    chain, slow = equal(32, 0.5, n_bytes=1), Network(Link(0.25, 1e30))
    last = replace(chain.blocks[-1], forward_ms=3.0, backward_ms=6.0, weight_gradient_ms=3.0)
    longer = replace(chain, blocks=(*chain.blocks[:-1], last))

    # Besides its 9 ms for each micro-batch, the other device waits for its F and I.
    more_ms = bound(longer, 2, 2, slow) - bound(chain, 2, 2, slow)
    assert more_ms >= (2 * (9 - 1.5) + 2.0) / 2


def test_micro_batches_follow_one_another_through_a_long_block() -> None:
    chain = equal(33, 0.5)
    long = replace(chain.blocks[1], forward_ms=4.0, backward_ms=0.0, weight_gradient_ms=0.0)
    slow = replace(chain, blocks=(chain.blocks[0], long, *chain.blocks[2:]))

    # When the fourth comes to it after 12.5 ms, there were 8 * 0.5 + 12 + 8 + 4 ms of forwards.
    assert bound(slow, 4, 8) == pytest.approx((8 * (4 + 32 * 1.5) + 50 - 28) / 4, rel=1e-3)


def test_micro_batches_follow_one_another_back_from_a_long_last_block() -> None:
    blocks = [block(f"b{k}", 0.5, 1.0, saved=1, weight_gradient_ms=0.5) for k in range(41)]
    blocks[-1] = replace(blocks[-1], forward_ms=3.0, backward_ms=3.0, weight_gradient_ms=0.0)

    # The second turns there 6 ms after the first. 9 ms after it, the first has been in the last
    # block for 3 ms and left 12 ms of backwards of others, the second has been in it for 3 ms.
    least_ms = (4 * (40 * 1.5 + 6) + 4 * 9 - (3 + 12 + 3)) / 4
    assert least_ms <= bound(plain(blocks), 4, 4) <= least_ms + 0.5


def test_smaller_stages_begin_sooner_but_cost_messages() -> None:
    slow = Network(Link(0.25, 1e30))
    bounds = [bound(equal(n, 24 / n, n_bytes=1), 2, 2, slow) for n in (2, 4, 8, 16, 96)]

    assert bounds == pytest.approx(sorted(bounds, reverse=True), rel=1e-6)
    # With many, each device still waits for the messages of each micro-batch.
    assert bounds[-1] > 72 + 2
    assert bound(equal(96, 24 / 96), 2, 2) < 72 + 1


def test_the_longest_stage_sets_the_pace() -> None:
    chain = equal(4, n_bytes=1)

    def waiting_ms(latency_ms: float) -> float:
        return pace_ms(atoms_of(chain, edges(chain), Network(Link(latency_ms, 1e30))), 2, 2)

    # Of two micro-batches one is late by a block, each has come through two messages;
    assert waiting_ms(0.1) == pytest.approx(1 + 2 * 0.2, rel=0.01)
    # or by two, where stages are longer.
    assert waiting_ms(0.5) == pytest.approx(2, rel=0.01)


def test_a_long_block_at_the_end_makes_nobody_late_by_more_than_what_is_left() -> None:
    blocks = [block(f"b{k}", 0.5, 1.0, saved=1, weight_gradient_ms=0.5) for k in range(24)]
    blocks[-1] = replace(blocks[-1], forward_ms=3.0)
    chain = plain(blocks)

    # The fourth has 3 ms left when the first is through, so the pace is 1 ms. Most wait until 4 ms
    # after that: then all forwards are done, and 7.5 ms of backwards of the first, 0.5 ms of the
    # second, which came 3.5 ms later. In truth the third and the fourth wait for 6 and 7 ms, as the
    # last block is one device's.
    least_ms, most_ms = 4 * 4 - 7.5 - 0.5, 4 + 4 + 6 + 7 - 7.5 - 0.5
    found = pace_ms(atoms_of(chain, edges(chain), FREE), 4, 4)
    assert 0.99 * least_ms <= found <= most_ms


def test_messages_behind_which_late_micro_batches_are_count_too() -> None:
    chain = equal(8, n_bytes=1)
    found = pace_ms(atoms_of(chain, edges(chain), Network(Link(0.01, 1e30))), 4, 4)

    # They are late by a block each. The first two wait for six messages at least, the third for
    # five, and the last for four, where runs are no longer than a block.
    assert found >= 1 + 2 + 3 + (2 * 6 + 5 + 4) * 0.01
    assert found == pytest.approx(6.21, abs=0.05)


def test_what_does_not_fit_at_once_waits_for_the_first_gradient() -> None:
    chain = equal(4, 0.5)

    # Two devices hold one micro-batch of 2 ms when its gradient comes, after 2 ms.
    assert bound(chain, 2, 4, free=4) == pytest.approx((4 * 6 + 2) / 2)
    assert bound(chain, 2, 4, free=16) == bound(chain, 2, 4) == pytest.approx(0.5 + 2 * 6)


def test_parameters_count_with_gradients_and_states_each_storage_once() -> None:
    tied = [block("a", parameters=10), block("b", parameters=10)]
    tied[1] = replace(tied[1], parameters=tied[0].parameters, buffers=(("buffer", 3),))

    assert bytes_free(plain(tied), (50, 40), 2.0) == 90 - 30 - 3


def test_where_parameters_leave_no_room_there_is_a_bound_all_the_same() -> None:
    chain = plain([block(f"b{k}", saved=k, parameters=100) for k in range(2)])
    free = bytes_free(chain, (50, 50), 0.0)

    assert free == 0
    with np.errstate(all="raise"):
        assert bound(chain, 2, 2, free=free) > 0


def small_chain(random: Random) -> Chain:
    """Three uneven blocks. The second may begin a branch that no gradient goes back from."""
    blocks = []
    for k in range(3):
        forward, other, weight = random.randint(1, 6), random.randint(0, 6), random.randint(0, 6)
        saved = ((f"saved {k}", random.randint(1, 9)),)
        blocks.append(
            Block((f"b{k}",), forward, other + weight, saved, weight_gradient_ms=float(weight))
        )
    values = [
        Value("input", 0, -1, (0,), gradient=random.random() < 0.5),
        Value("v1", random.choice([0, 20]), 1, (2,), gradient=True),
    ]
    if random.random() < 0.3:
        values += [Value("other", 0, -1, (1,), False), Value("v0", 10, 0, (2,), gradient=True)]
    else:
        values.append(Value("v0", random.choice([0, 20]), 0, (1,), gradient=True))
    return Chain(tuple(blocks), tuple(values), (True,) * 3)


def one_by_one(devices: tuple[int, ...], n_devices: int, m: int) -> Schedule:
    """Each micro-batch goes there and back before the next begins."""
    rows: list[list[Action]] = [[] for _ in range(n_devices)]
    for i in range(m):
        for j, device in enumerate(devices):
            rows[device].append(Action(j, Kind.FORWARD, i))
        for j, device in reversed(list(enumerate(devices))):
            rows[device] += [Action(j, Kind.INPUT, i), Action(j, Kind.WEIGHT, i)]
    return Schedule(tuple(map(tuple, rows)))


def best_steps(
    chain: Chain, p: int, m: int, network: Network, capacity: tuple[int, ...]
) -> Iterator[float]:
    """The best step of each way to cut the chain and to place its stages that fits."""
    n = len(chain.blocks)
    for n_stages in range(1, n + 1):
        maps = product(range(p), repeat=n_stages)
        for cuts, devices in product(combinations(range(1, n), n_stages - 1), list(maps)):
            neighbours = pairwise(devices)
            if devices[0] or any(a == b for a, b in neighbours):
                continue  # as another one
            stages, messages = stage_costs(chain, cuts, 0.0)
            never = ((False,) * m,) * n_stages
            problem = OrderProblem(stages, messages, network, devices, capacity, never)
            hint = one_by_one(devices, p, m)
            table, _ = solve(problem, hint=hint, seed=0, time_limit_s=2)
            over, step_ms = problem.rank(table)
            if not over:
                yield step_ms


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_of_a_small_chain_is_shorter(seed: int) -> None:
    random = Random(seed)
    chain, m = small_chain(random), random.choice([1, 2, 3])
    network = random.choice([FREE, Network(Link(0.5, 10.0))])
    capacity = (random.choice([1000, 25]),) * 2

    least_ms = bound(chain, 2, m, network, bytes_free(chain, capacity, 0.0))

    best_ms = min(best_steps(chain, 2, m, network, capacity))
    assert (0.6 if m < 3 else 0.5) * best_ms <= least_ms <= best_ms * (1 + 1e-9)


@pytest.mark.parametrize(("name", "loops"), [("zb-v", 2), ("interleaved", 3), ("zb-h1", 1)])
def test_no_named_schedule_is_shorter(name: str, loops: int) -> None:
    chain = equal(12, n_bytes=10)
    network = Network(Link(0.1, 100.0))
    table = order.build(name, 4, 4, loops)
    n_stages = 4 * loops
    cuts = tuple(12 // n_stages * k for k in range(1, n_stages))
    stages, messages = stage_costs(chain, cuts, 0.0)
    never = ((False,) * 4,) * n_stages
    problem = OrderProblem(stages, messages, network, table.stage_to_device, (10**6,) * 4, never)

    assert bound(chain, 4, 4, network) <= problem.rank(table)[1]


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_shorter_however_it_cuts_uneven_blocks(seed: int) -> None:
    random = Random(seed)
    p, n = random.choice([2, 3, 4]), 14
    costs = [random.choice([0.2, 0.5, 1.0, 1.0, 4.0]) for _ in range(n)]
    blocks = [
        block(f"b{k}", ms, 2 * ms, saved=1, weight_gradient_ms=ms) for k, ms in enumerate(costs)
    ]
    values = plain(blocks, 10).values
    uneven = [replace(value, bytes=random.choice([0, 10, 50])) for value in values]
    chain, network = Chain(tuple(blocks), tuple(uneven), (True,) * n), Network(Link(0.02, 100.0))
    problem = SearchProblem(
        chain, edges(chain), p, p, network, (10**6,) * p, 0.0, recompute=False, loops=(n,)
    )
    judge, least_ms = Judge(problem), bound(chain, p, p, network)

    for _ in range(300):
        n_stages = random.randint(p, n)
        cuts = sorted(random.sample(range(1, n), n_stages - 1))
        first = random.randrange(p)
        devices = tuple(
            (first + j) % p if random.random() < 0.9 else random.randrange(p)
            for j in range(n_stages)
        )
        candidate = Candidate((0, *cuts, n), devices, (0,) * n_stages, p)
        assert least_ms <= judge(candidate, (1, p), 2).worth[1]
