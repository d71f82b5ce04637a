"""Devices wait for the host, and its threads, a lane's each, for each other."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from chains import block, plain
from test_simulate import FREE, timeline

from fxpipe.ir import Launch
from fxpipe.passes import order
from fxpipe.passes.partition import partition
from fxpipe.passes.partition_launches import with_launches
from fxpipe.passes.simulate import simulate
from fxpipe.passes.simulate_costs import StageCost
from fxpipe.passes.simulate_launches import Hosts
from fxpipe.planned import planned, weighed_against
from fxpipe.question import Question

CHAIN = plain([block(f"b{k}", forward_ms=1.0, backward_ms=1.0) for k in range(4)])
ROOM = (2**40,) * 4
NEVER = [[False] * 2] * 2
TABLE = order.build("gpipe", 2, 2)  # of two stages of two ops


def launched(launch, *, apart=False, recompute=NEVER, segments=(), table=TABLE):
    found = Hosts(launch, apart).launched(CHAIN, (2,), table, recompute, segments)
    actions = [str(action) for row in table.rows for action in row]
    return dict(zip(actions, map(tuple, found.T.tolist()), strict=True))


def test_threads_that_share_all_take_turns():
    found = launched(Launch(1.0, 2.0, loss_ms=1.0))
    assert [found[action] for action in ("0F0", "0F1", "1F0", "1F1")] == [
        (0, 2),
        (2, 4),
        (4, 7),  # with the loss
        (7, 10),
    ]
    ends = sorted(found.values())
    assert all(before[1] <= after[0] for before, after in pairwise(ends))


def test_threads_that_share_nothing_wait_for_what_they_are_given():
    found = launched(Launch(1.0, 2.0, serial=0.0))
    assert found["0F1"] == found["1F0"] == (2, 4)
    assert found["1B1"][1] == found["0B1"][0]  # last in, first out


def test_between_them_each_has_a_share_for_itself():
    """The other one begins to launch when half of an action is through."""
    found = launched(Launch(1.0, 2.0, serial=0.5))
    assert found["0F1"] == (2, 4)
    assert found["1F0"] == (3, 5)


def test_processes_launch_without_regard_to_each_other():
    found = launched(Launch(1.0, 2.0, action_ms=0.5), apart=True)
    for lane in "01":
        spans = [span for action, span in found.items() if action.startswith(lane)]
        assert spans == [(0, 2.5), (2.5, 5), (5, 9.5), (9.5, 14)]


def test_what_is_computed_again_is_launched_again():
    def takes(**again):
        start, end = launched(Launch(1.0, 2.0), **again)["0B0"]
        return end - start

    assert takes() == 4
    assert takes(recompute=[[True] * 2] * 2) == 6
    assert takes(segments=[[(0, 1)], []]) == 5


def test_halves_of_a_backward_take_half_of_its_launches():
    table = order.build("zb-h1", 2, 2)
    found = launched(Launch(1.0, 2.0), table=table, apart=True)
    halves = [f"1{kind}0" for kind in "IW"]
    assert [found[half][1] - found[half][0] for half in halves] == [2, 2]


def test_an_action_begins_and_ends_no_sooner_than_it_is_launched():
    table = order.build("gpipe", 1, 2)
    at = np.array([[0.0, 3.0, 4.0, 5.0], [2.0, 4.0, 5.0, 6.0]])
    found = simulate(table, [StageCost(1.0, 3.0)], [], FREE, [[False] * 2], launched=at)
    assert timeline(found, table) == ["00.1bbbaaa"]


@pytest.mark.parametrize("name", order.NAMES)
def test_a_table_is_never_faster_than_its_host_nor_than_its_devices(name):
    chain = plain([block(f"b{k}") for k in range(12)])
    plan = partition(
        chain,
        n_stages=2 * order.usual_loops(name, 2),
        n_microbatches=4,
        schedule=name,
        checkpoint="never",
        network=FREE,
        capacity_bytes=ROOM[:2],
        solver="dp",
        loops=order.usual_loops(name, 2),
    )
    for ms in (0.1, 0.5, 2.0):
        hosts = Hosts(Launch(ms, ms))
        found = with_launches(chain, plan, FREE, ROOM, 1.0, hosts).estimate
        assert hosts.least_ms(chain, 2, 4) == pytest.approx(12 * 4 * 2 * ms)
        assert found.step_ms >= max(found.captured_ms, hosts.least_ms(chain, 2, 4))
        for eased in (replace(hosts, apart=True), Hosts(Launch(ms, ms, serial=0.25))):
            less = with_launches(chain, plan, FREE, ROOM, 1.0, eased).estimate
            assert eased.least_ms(chain, 2, 4) <= less.step_ms <= found.step_ms
            assert (less.together_bytes is None) == eased.apart
        assert found.together_bytes <= sum(found.peak_bytes)


def test_what_is_planned_waits_for_its_hosts():
    question = Question(CHAIN, 2, 4, FREE, (2**40,) * 2, 1.0, hosts=Hosts(Launch(3.0, 3.0)))
    table = order.build("1f1b", 2, 4)
    found = planned(question, "1f1b", table).estimate
    alone = planned(replace(question, hosts=None), "1f1b", table).estimate
    assert found.step_ms > alone.step_ms == found.captured_ms
    assert alone.captured_ms is None
    over = planned(question.over(FREE), "1f1b", table).estimate
    assert alone.step_ms < over.step_ms < found.step_ms


def test_the_search_takes_fewer_stages_where_each_costs_the_host_time():
    """A plan of many stages, which is the shortest without a host, has more to launch."""
    chain = plain([block(f"b{k}", backward_ms=1.0) for k in range(16)], n_bytes=0)
    question = Question(chain, 4, 4, FREE, (2**40,) * 4, 1.0)
    free = planned(question, "auto", None, time_limit_s=2.0)
    hosts = Hosts(Launch(0.1, 0.1, action_ms=1.0))
    found = planned(replace(question, hosts=hosts), "auto", None, time_limit_s=2.0)
    assert len(found.cuts) < len(free.cuts)
    assert found.bound_ms == free.bound_ms
    assert (
        found.estimate.step_ms < with_launches(chain, free, FREE, ROOM, 1.0, hosts).estimate.step_ms
    )
    named = weighed_against(replace(question, hosts=hosts))
    assert found.estimate.step_ms <= min(one.step_ms for one in named)


def test_of_plans_that_launching_makes_alike_it_is_one_that_holds_little():
    chain = plain([block(f"b{k}", saved=100) for k in range(8)], n_bytes=0)
    hosts = Hosts(Launch(3.0, 3.0))
    question = Question(chain, 2, 8, FREE, (2**40,) * 2, 1.0, hosts=hosts)
    found = planned(question, "auto", None, time_limit_s=1.0).estimate
    named = {one.schedule: one for one in weighed_against(question)}
    assert named["1f1b"].peak_bytes < named["gpipe"].peak_bytes
    assert max(found.peak_bytes) <= named["1f1b"].peak_bytes
    assert found.step_ms <= min(one.step_ms for one in named.values())


def test_a_plan_is_compared_with_what_launching_takes_where_that_is_more():
    question = Question(CHAIN, 2, 4, FREE, (2**40,) * 2, 1.0, hosts=Hosts(Launch(3.0, 3.0)))
    found = planned(question, "auto", None, time_limit_s=0.5)
    assert found.bound_ms == 4 * 4 * (3.0 + 3.0)
    assert found.gap < 0.05
    light = replace(question, hosts=Hosts(Launch(0.01, 0.01)))
    alone = planned(replace(question, hosts=None), "auto", None, time_limit_s=0.5)
    assert planned(light, "auto", None, time_limit_s=0.5).bound_ms == alone.bound_ms


def test_hosts_matter_where_launching_takes_half_as_long_as_what_is_launched():
    """Four ops of 2 ms for two devices, so 4 ms each."""
    one = Launch(0.3, 0.3)
    assert Hosts(one).matter(CHAIN, 2)
    assert not Hosts(replace(one, serial=0.5)).matter(CHAIN, 2)
    assert not Hosts(one, apart=True).matter(CHAIN, 2)
