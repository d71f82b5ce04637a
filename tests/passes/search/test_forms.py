"""What a search begins with: how stages are shaped, and that drawing them finds short steps."""

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from chains import KIB, block, plain
from searches import problem

from fxpipe.ir import Link, Network
from fxpipe.passes import order
from fxpipe.passes.search import climbs
from fxpipe.passes.search.climbs import Search
from fxpipe.passes.search.forms import Form, Forms
from fxpipe.passes.search.judge import Candidate, Judge


def form(n_stages: int, *, back: bool = False, shift: int = 0) -> Form:
    return Form(
        n_stages,
        back,
        shift,
        growing=2,
        first=0.5,
        falling=4,
        last=0.2,
        message_price=1.0,
        price=0,
        halved=8,
        group=1,
        patience=0.0,
        rhythm=None,
    )


def test_stages_grow_at_the_begin_and_shrink_at_the_end() -> None:
    assert form(8).shares() == pytest.approx([0.5, 0.75, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_each_device_has_its_turn_but_for_the_last_stage() -> None:
    assert form(7).device_of(3) == (0, 1, 2, 0, 1, 2, 0)
    assert form(7, back=True).device_of(3) == (0, 1, 2, 2, 1, 0, 0)
    assert form(7, shift=2).device_of(3) == (0, 1, 2, 0, 1, 2, 2)


def test_no_device_is_left_without_a_stage() -> None:
    assert form(3, shift=1).device_of(3) == (0, 1, 2)


@pytest.mark.parametrize("p", [4, 8])
def test_drawn_forms_are_sooner_begun_and_sooner_done_than_equal_stages(p: int) -> None:
    m, n_blocks = 2 * p, 24 * p
    chain = plain([block(f"b{k}", weight_gradient_ms=1.0) for k in range(n_blocks)], 0)
    judge = Judge(problem(chain, p, m, network=Network(Link(0.0, 1e6))))
    shape = tuple(range(p)) * 3
    equal = judge(Candidate(tuple(range(0, n_blocks + 1, 8)), shape, (0,) * 3 * p, m), (1, p, m), 2)
    forms = Forms(judge, 0, Random(0))

    forms.draw(3e6, is_enough=lambda found: False)

    computing_ms = 3.0 * m * n_blocks / p
    shortest_ms = min(found.worth[1] for found in forms.best.values())
    assert shortest_ms - computing_ms < 0.8 * (equal.worth[1] - computing_ms)


def test_drawing_ends_with_what_is_enough() -> None:
    judge = Judge(problem(plain([block(f"b{k}") for k in range(12)], 0), 2, 2))
    forms = Forms(judge, 0, Random(0))

    forms.draw(1e9, is_enough=lambda found: True)

    assert len(forms.best) == 1


def test_where_an_order_is_given_forms_keep_it_and_its_map() -> None:
    chain = plain([block(f"b{k}", float(1 + k % 3)) for k in range(24)], 0)
    table = order.build("zb-v", 2, 4, 2)
    asked = problem(chain, 2, 4, table=table)
    forms = Forms(Judge(asked), 0, Random(0), table=table)

    forms.draw(1e5, is_enough=lambda found: False)

    assert list(forms.best) == [table.stage_to_device]
    assert all(found.candidate.table is table for found in forms.best.values())


def test_where_a_named_schedule_is_the_best_begun_with_forms_are_of_any_number_of_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(climbs, "_SLOW", 1e3)
    blocks = [block(f"b{k}", 1.0, 2.0, saved=KIB, weight_gradient_ms=1.0) for k in range(16)]
    asked = problem(plain(blocks, 0), 4, 8, 16 * KIB, network=Network(Link(0.0, 1e6)))
    search = Search(asked, seed=0, time_limit_s=1.0)

    with ThreadPoolExecutor(1) as pool:
        begun = search._begun(pool)
        first = min((climb.best for climb in begun), key=lambda found: found.worth)
        formed, _ = search._formed(pool, begun, first, 1e5 / search.budget, short=False)

    assert first.candidate.table is not None
    assert any(len(climb.best.candidate.device_of) % 4 for climb in formed)
