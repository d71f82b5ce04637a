"""The search: its judge against the simulator, what it finds, what it can't."""

import re
from dataclasses import replace
from itertools import combinations, pairwise, product
from random import Random

import numpy as np
import pytest
from chains import KIB, block, halved_slowly, plain, random_chain
from searches import NETWORK, problem, searched

from fxpipe.errors import PlanError
from fxpipe.ir import Chain, CheckpointMode, Link, Network, Value
from fxpipe.passes import order
from fxpipe.passes.checkpoints import place
from fxpipe.passes.partition_costs import evaluate
from fxpipe.passes.partition_path import even_path
from fxpipe.passes.search import climbs
from fxpipe.passes.search.climbs import Search
from fxpipe.passes.search.judge import Candidate, Found, Judge, shapes
from fxpipe.passes.search.plan import LOOPS, chain_loops, segments_of
from fxpipe.passes.search.shift_kernel import critical_counts, critical_ms
from fxpipe.passes.search.tables import table_of


@pytest.mark.parametrize("seed", range(12))
def test_the_judge_says_what_the_simulator_says(seed: int) -> None:
    random = Random(seed)
    chain = halved_slowly(random_chain(random, 24, n_skips=4), random)
    # The last block reads it, and the model returns it.
    both = Value("both", 3000, 0, (23, 24), gradient=True)
    chain = replace(chain, values=(*chain.values, both))
    chain = saved_by_several(chain, random)
    p, m = random.choice([2, 3]), random.choice([2, 4])
    asked = problem(chain, p, m, recompute=True)
    judge = Judge(asked)
    shape = random.choice(shapes(p, asked.loops))
    prices = tuple(random.randrange(len(judge.prices)) for _ in shape)
    halved = random.randint(0, m)
    path = even_path(chain, asked.edges, len(shape))

    found = judge(Candidate(path, shape, prices, halved), (1, p), 2)

    bounds = [asked.edges[e] for e in found.candidate.path]
    again = judge.numbers(found.candidate)[1].tolist()
    expected = evaluate(
        chain,
        tuple(bounds[1:-1]),
        schedule=table_of(found, p),
        checkpoint=place(CheckpointMode.NEVER, len(shape)),
        network=NETWORK,
        training_factor=2.0,
        segments=[segments_of(again, b, e) for b, e in pairwise(bounds)],
    )
    assert found.worth == (0, pytest.approx(expected.step_ms))
    assert found.ran[7].tolist() == list(expected.peak_bytes)


def saved_by_several(chain: Chain, random: Random) -> Chain:
    """The chain whose blocks save what goes into them too, and some what one before them saves."""
    blocks = list(chain.blocks)
    for k in range(1, len(blocks)):
        earlier = random.choice(blocks[:k]).saved[:1] if random.random() < 0.5 else ()
        came = ((f"v{k - 1}", chain.values[k - 1].bytes),)
        blocks[k] = replace(blocks[k], saved=(*blocks[k].saved, *came, *earlier))
    return replace(chain, blocks=tuple(blocks))


def test_the_judge_counts_tied_weights_once_on_one_device() -> None:
    chain = plain([block(name, parameters=KIB) for name in "abcd"])
    ends = [replace(one, parameters=(("tied", 50 * KIB),)) for one in chain.blocks[::3]]
    tied = replace(chain, blocks=(ends[0], *chain.blocks[1:3], ends[1]))
    judge = Judge(problem(tied, 2, 2))

    def peak(shape: tuple[int, ...]) -> int:
        found = judge(Candidate((0, 1, 2, 3, 4), shape, (0,) * 4, 2), (1, 2), 2)
        return max(found.ran[7].tolist())

    # With gradients and Adam's states.
    assert peak((0, 1, 1, 0)) < 3 * 51 * KIB + 10 * KIB
    assert peak((0, 1, 0, 1)) < 3 * 51 * KIB + 10 * KIB


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("tied", "halved"),
    [
        pytest.param((), 4, id="what stages hand over on one device"),
        pytest.param((("tied", 100 * KIB),), 0, id="gradients of a weight that add up"),
    ],
)
def test_the_judge_counts(seed: int, tied: tuple[tuple[str, int], ...], halved: int) -> None:
    chain = random_chain(Random(seed), 12, n_skips=3)
    needs = {"forward_workspace_bytes": 1, "backward_workspace_bytes": 1}
    needing = replace(
        chain,
        blocks=tuple(
            replace(one, parameters=(*one.parameters, *tied), trained=tied, **needs)
            for one in chain.blocks
        ),
    )
    asked = problem(needing, 2, 4)
    shape = (0, 1, 1, 0)
    path = even_path(chain, asked.edges, 4)

    found = Judge(asked)(Candidate(path, shape, (0,) * 4, halved), (1, 2), 2)

    cuts = tuple(asked.edges[e] for e in found.candidate.path[1:-1])
    exact = evaluate(
        needing,
        cuts,
        schedule=table_of(found, 2),
        checkpoint=place(CheckpointMode.NEVER, 4),
        network=NETWORK,
        training_factor=2.0,
    ).peak_bytes
    assert all(real <= peak for real, peak in zip(exact, found.ran[7].tolist(), strict=True))


def test_devices_that_do_the_sending_are_sent_few_values() -> None:
    # Within each four blocks all values go on to the last of them, which hands on one.
    blocks = tuple(block(f"b{k}") for k in range(24))
    ends = [k - k % 4 + 3 if k % 4 < 3 else k + 1 for k in range(24)]
    values = (Value(f"v{k}", 8, k, (end,), gradient=True) for k, end in enumerate(ends))
    chain = Chain(blocks, tuple(values), (True,) * 24)

    def sent(value_ms: float) -> list[int]:
        network = Network(Link(0.0, 1e30, value_ms=value_ms))
        plan = searched(problem(chain, 3, 6, network=network))
        between = zip(plan.cuts, pairwise(plan.stage_to_device), strict=True)
        return [len(chain.crossing(cut - 1)) for cut, (d, e) in between if d != e]

    assert max(sent(0.0)) > 1
    assert set(sent(1.0)) == {1}


@pytest.mark.parametrize("seed", range(10))
def test_no_plan_is_shorter_than_the_bound(seed: int) -> None:
    random = Random(seed)
    chain = random_chain(random, random.randint(6, 14), n_skips=random.randint(0, 2))
    asked = problem(chain, random.choice([2, 3]), random.choice([1, 2, 5]))

    plan = searched(asked)

    assert plan.bound_ms is not None
    assert plan.bound_ms <= plan.estimate.step_ms


@pytest.mark.parametrize(("p", "m", "step_ms"), [(4, 8, 27), (8, 16, 55), (8, 32, 103)])
def test_one_block_a_device_with_halves_alike_is_as_short_as_can_be(
    p: int, m: int, step_ms: int
) -> None:
    blocks = [block(f"b{k}", 1.0, 2.0, saved=1, weight_gradient_ms=1.0) for k in range(p)]
    free = Network(Link(0.0, 1e30))
    values = (replace(plain(blocks).values[0], name="x", producer=-1, consumers=(0,), bytes=0),)
    chain = Chain(tuple(blocks), (*values, *plain(blocks, 0).values[:-1]), (True,) * p)
    asked = problem(chain, p, m, network=free)

    plan = searched(replace(asked, capacity_bytes=(p,) * p))

    assert plan.estimate.step_ms == pytest.approx(step_ms)
    assert plan.gap == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_never_worse_than_a_named_schedule_on_stages_of_equal_time(seed: int) -> None:
    chain = random_chain(Random(seed), 30, n_skips=2)
    asked = problem(chain, 3, 6)

    plan = searched(asked)

    for name in order.NAMES:
        table = order.build(name, 3, 6, order.usual_loops(name, 3))
        path = even_path(chain, asked.edges, table.n_stages)
        found = Judge(asked)(
            Candidate(path, table.stage_to_device, (0,) * table.n_stages, 0, table), (), 0
        )
        assert plan.estimate.step_ms <= found.worth[1] * (1 + 1e-9)


@pytest.mark.parametrize("most", [1, 8])
def test_the_same_seed_gives_the_same_plan(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(random_chain(Random(5), 60), 3, 6)
    monkeypatch.setattr(climbs, "_MOST_CLIMBS", most)
    monkeypatch.setattr(climbs, "_ANOTHER", 1)

    plans = [searched(asked, seed) for seed in (1, 1, 2)]

    assert (plans[0].cuts, plans[0].schedule) == (plans[1].cuts, plans[1].schedule)
    assert plans[0].schedule != plans[2].schedule


def test_where_halves_take_long_cuts_and_order_are_made_for_whole_backwards() -> None:
    costs = {"saved": KIB, "weight_gradient_ms": 0.07, "halving_ms": 0.1}
    blocks = [block(f"b{k}", 0.12 if k % 5 else 0.18, 0.18, **costs) for k in range(48)]
    slow = Network(Link(0.5, 1e9, value_ms=0.2))
    asked = replace(problem(plain(blocks, 0), 2, 16, 6 * 24 * KIB, network=slow), loops=(1,))

    plan = searched(asked)

    whole = min(
        Judge(asked)(Candidate((0, cut, 48), (0, 1), (0, 0), 0), (1, 16), 3).worth
        for cut in range(20, 30)
    )
    assert plan.estimate.step_ms <= whole[1] * (1 + 1e-9)


def test_devices_that_choose_leave_room_for_whole_backwards() -> None:
    needs = {"forward_workspace_bytes": KIB, "backward_workspace_bytes": 30 * KIB}
    blocks = [replace(block(f"b{k}", saved=10 * KIB), **needs) for k in range(4)]
    asked = problem(plain(blocks), 2, 8)
    one_by_one = order.build("1f1b", 2, 8)
    candidate = Candidate((0, 2, 4), (0, 1), (0, 0), 0)
    fits = Judge(asked)(replace(candidate, table=one_by_one), (), 0)

    judge = Judge(replace(asked, capacity_bytes=tuple(fits.ran[7].tolist())))

    assert judge(candidate, (8,), 1).worth[0] == 0


@pytest.mark.parametrize("seed", [24, 32, 35, 38])
def test_what_fits_where_devices_wait_for_room_fits_as_a_table_too(seed: int) -> None:
    chain = halved_slowly(random_chain(Random(seed), 16, n_skips=2), Random(seed))
    roomy = Judge(problem(chain, 2, 4))
    peak = max(
        roomy(Candidate(even_path(chain, roomy.problem.edges, 2), (0, 1), (0, 0), 4), (2,), 1).ran[
            7
        ]
    )
    short = Judge(replace(roomy.problem, capacity_bytes=(int(peak) // 2,) * 2, recompute=True))

    fitting = 0
    for shape, step, halved in product(shapes(2, (1, 2, 3)), range(0, 24, 3), (0, 4)):
        path = even_path(chain, short.problem.edges, len(shape))
        found = short(Candidate(path, shape, (step,) * len(shape), halved), (1, 2), 3)
        if not found.worth[0]:
            fitting += 1
            table = replace(found.candidate, table=table_of(found, 2))
            assert short(table, (), 0).worth == found.worth

    assert fitting > 0


def test_a_table_given_is_kept() -> None:
    table = order.gpipe(2, 4)

    plan = searched(problem(random_chain(Random(5), 20), 2, 4, table=table))

    assert plan.schedule == table


def test_what_does_not_fit_is_computed_again() -> None:
    chain = plain([block(f"b{k}", saved=10 * KIB) for k in range(12)], n_bytes=KIB)
    asked = problem(chain, 2, 4, capacity=45 * KIB)

    with pytest.raises(PlanError):
        searched(asked)
    plan = searched(replace(asked, recompute=True))

    assert max(plan.estimate.peak_bytes) <= 45 * KIB
    assert any(plan.segments)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_step_hangs_on_adds_up_to_it(seed: int) -> None:
    chain = replace(halved_slowly(random_chain(Random(seed), 24), Random(seed)), action_ms=0.0)
    judge = Judge(problem(chain, 3, 6, network=Network(Link(0.0, 1e6))))
    candidate = Candidate(even_path(chain, judge.problem.edges, 6), (0, 1, 2) * 2, (0,) * 6, 4)
    found = judge(candidate, (1,), 1)

    counts = critical_counts(*(found.ran[k] for k in (1, 2, 5, 6)), np.array(candidate.device_of))

    told = critical_ms(np.array(candidate.path), *counts, *judge.by_place)
    assert told == pytest.approx(found.worth[1])


@pytest.mark.parametrize("seed", range(20))
def test_bounds_move_and_every_stage_keeps_an_atom(seed: int) -> None:
    chain = random_chain(Random(seed), 12)
    judge = Judge(problem(chain, 2, 2))
    path = even_path(chain, judge.problem.edges, 4)
    found = judge(Candidate(path, (0, 1) * 2, (0,) * 4, 2), (1,), 1)

    moved = judge.shifted(found, 1 + seed % 4, seed)

    assert (moved[0], moved[-1], len(moved)) == (path[0], path[-1], len(path))
    assert all(a < b for a, b in pairwise(moved))
    assert moved == judge.shifted(found, 1 + seed % 4, seed)


def test_the_chosen_move_makes_no_other_device_the_one_that_takes_longest() -> None:
    chain = plain([block(f"b{k}") for k in range(60)], 0)
    judge = Judge(problem(chain, 3, 24, network=Network(Link(0.0, 1e6))))
    found = judge(Candidate((0, 22, 41, 60), (0, 1, 2), (0,) * 3, 24), (1,), 1)

    path = judge.shifted(found, 256, seed=0)

    again = judge(Candidate(path, (0, 1, 2), (0,) * 3, 24), (1,), 1)
    assert again.worth[1] < found.worth[1]


@pytest.mark.parametrize("seed", range(6))
def test_stages_made_alike_differ_least_from_their_shares(seed: int) -> None:
    random = Random(seed)
    chain = random_chain(random, 9)
    judge = Judge(problem(chain, 3, 6, network=Network(Link(0.0, 1e3))))
    shares, price = np.array([random.choice([0.5, 1.0, 2.0]) for _ in range(4)]), 0.3
    forward, backward, *_, message = judge.by_place
    n_edges = len(judge.problem.edges)

    def differs(path: tuple[int, ...]) -> float:
        found = 0.0
        for j, (begin, end) in enumerate(pairwise(path)):
            parts = [
                (costs[end] - costs[begin]) / costs[-1] * shares.sum() / shares[j] - 1
                for costs in (forward, backward)
            ]
            if begin == 0 or end == n_edges - 1:
                parts = [max(part, 0.0) for part in parts]
            found += sum(part**2 for part in parts)
            found += price * message[end] / forward[-1] * shares.sum() if end < n_edges - 1 else 0.0
        return found

    ways = ((0, *cuts, n_edges - 1) for cuts in combinations(range(1, n_edges - 1), 3))

    path = judge.alike(shares, price)
    assert differs(path) == pytest.approx(min(map(differs, ways)))


def test_alike_stages_of_a_model_are_its_layers() -> None:
    layer = [block(f"b{k}", ms, 2 * ms) for k, ms in enumerate((1.0, 4.0, 2.0))]
    chain = plain([block("embed", 0.5, 1.0), *layer * 8, block("head", 3.0, 6.0)])
    # What a layer hands to the next is smaller than what is between its blocks.
    values = [replace(v, bytes=1000 if k % 3 == 0 else 3000) for k, v in enumerate(chain.values)]
    slow = Network(Link(0.0, 1e3))
    judge = Judge(problem(replace(chain, values=tuple(values)), 2, 2, network=slow))

    path = judge.alike(np.ones(9), price=0.3)

    assert path == (0, 4, 7, 10, 13, 16, 19, 22, 25, 26)


def test_a_device_with_more_to_do_has_no_leisure() -> None:
    chain = plain([block(f"b{k}") for k in range(8)], 0)
    judge = Judge(problem(chain, 2, 2, network=Network(Link(0.0, 1e3))))

    candidate = Candidate((0, 1, 4, 5, 8), (0, 1, 0, 1), (0,) * 4, 4)
    leisure = judge.leisure(judge(candidate, (1,), 1))

    assert leisure.tolist() == pytest.approx([2, 2 / 3, 2, 2 / 3])


def test_blocks_that_take_no_time_are_cut_as_well() -> None:
    nothing = plain([block(f"b{k}", 0.0, 0.0) for k in range(6)])
    some = plain([block(f"b{k}", float(k == 5), float(k == 5)) for k in range(6)])

    assert searched(problem(nothing, 2, 2)).gap == pytest.approx(1.0)
    assert searched(problem(some, 2, 2)).estimate.step_ms == pytest.approx(4.0, rel=0.1)


def test_a_bare_chain_may_be_cut_into_more_stages_a_device() -> None:
    assert chain_loops(2) == tuple(range(1, 17))
    assert chain_loops(8) == tuple(range(1, 9))
    assert chain_loops(16) == LOOPS


def test_a_search_tells_of_each_better_step() -> None:
    told: list[float] = []
    asked = problem(random_chain(Random(5), 30), 2, 4)

    Search(asked, seed=0, time_limit_s=20.0, progress=told.append).run()

    assert told
    assert told[-1] <= told[0]


def test_a_slow_machine_still_comes_to_what_a_search_ends_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = problem(random_chain(Random(5), 30, n_skips=4), 2, 4)
    refine, refined = climbs.refined, []

    def counted(judge: Judge, here: Found, random: Random) -> Found:
        refined.append(here)
        return refine(judge, here, random)

    monkeypatch.setattr(climbs, "refined", counted)
    # No machine does so much in a second.
    monkeypatch.setattr(climbs, "_WORK_PER_SECOND", 1e12)
    search = Search(asked, seed=0, time_limit_s=3.0)
    search.bound_ms = 0.0
    search.run()

    assert len(refined) > 10


def test_what_fits_nowhere_says_what_the_nearest_plan_lacks_and_what_would_help() -> None:
    chain = plain([block(f"b{k}", saved=10 * KIB, parameters=10 * KIB) for k in range(8)], 0)

    with pytest.raises(PlanError) as error:
        searched(problem(chain, 2, 4, capacity=155 * KIB))

    found = re.fullmatch(
        r"no plan fits: in the nearest one found, device \d needs (.*) at \d[FBIW]\d and has "
        r"155.00 KiB, (.*) less. What would make it fit: (.*)",
        str(error.value),
    )
    assert found is not None
    assert found[3] == "`--checkpoint auto`, or smaller micro-batches"

    with pytest.raises(PlanError, match=r"has 1 byte, .*: devices with more memory$"):
        searched(problem(chain, 2, 4, capacity=1))
    with pytest.raises(PlanError, match=r"byte` 1\), or 3 devices of 120.00 KiB, with `--check"):
        searched(problem(chain, 2, 4, capacity=120 * KIB, recompute=True))


@pytest.mark.parametrize(
    ("divides", "how"),
    [((), "`optimizer_bytes_per_parameter_byte` 1"), ((0,) * 8, "`--optimizer sgd`")],
    ids=["of a bare chain", "of a model"],
)
def test_that_states_of_the_optimizer_are_too_much_is_said_as_it_can_be_asked(
    divides: tuple[int, ...], how: str
) -> None:
    chain = plain([block(f"b{k}", saved=KIB, parameters=10 * KIB) for k in range(8)], 0)
    asked = problem(replace(chain, divides=divides), 2, 4, capacity=120 * KIB)

    with pytest.raises(PlanError, match=re.escape(f"an optimizer without states ({how})")):
        searched(replace(asked, training_factor=3.0))


def test_segments_that_touch_come_back_one_at_a_time_where_all_at_once_do_not_fit() -> None:
    chain = plain([block(f"b{k}", saved=10 * KIB, parameters=10 * KIB) for k in range(8)], 0)

    plan = searched(problem(chain, 2, 4, capacity=130 * KIB, recompute=True))

    assert any(a[1] == b[0] for own in plan.segments for a, b in pairwise(own))
    assert max(plan.estimate.peak_bytes) <= 130 * KIB
