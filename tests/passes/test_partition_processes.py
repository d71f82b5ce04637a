"""Where each device has a process, plans have room for what that holds of messages."""

from dataclasses import replace

from chains import KIB, block, plain
from partitions import LINK, plan

from fxpipe.ir import Network
from fxpipe.passes.partition_processes import with_messages_held

LANES, PROCESSES = Network(LINK), Network(replace(LINK, value_ms=0.2))
CHAIN = plain([block(f"b{k}", saved=50 * KIB) for k in range(8)], n_bytes=1000)
PLAN = plan(CHAIN, 2)
ROOMY = (KIB**3, KIB**3)


def test_lanes_of_one_process_hold_no_more() -> None:
    assert with_messages_held(CHAIN, PLAN, LANES, ROOMY) == PLAN


def test_processes_hold_what_leaves_and_a_fiftieth_of_what_comes() -> None:
    (first, second), sent = PLAN.estimate.peak_bytes, 4 * 1000
    found = with_messages_held(CHAIN, PLAN, PROCESSES, ROOMY).estimate
    assert found.ahead_bytes == (first // 50, second // 50)
    assert found.peak_bytes == (first + sent + first // 50, second + sent + second // 50)


def test_a_large_message_leaves_while_the_next_is_made_and_so_much_is_asked_for_at_most() -> None:
    large = replace(PLAN, estimate=replace(PLAN.estimate, peak_bytes=(KIB**3, KIB**3)))
    chain = plain(list(CHAIN.blocks), n_bytes=KIB**2)
    found = with_messages_held(chain, large, PROCESSES, (2 * KIB**3,) * 2).estimate
    assert found.ahead_bytes == (KIB**2, KIB**2)
    assert found.peak_bytes == (KIB**3 + 2 * KIB**2 + KIB**2,) * 2


def test_of_small_messages_several_leave_at_once() -> None:
    (first, second), chain = PLAN.estimate.peak_bytes, plain(list(CHAIN.blocks), n_bytes=30 * KIB)
    found = with_messages_held(chain, PLAN, PROCESSES, ROOMY).estimate
    leaving = [peak - more for peak, more in zip(found.peak_bytes, found.ahead_bytes, strict=True)]
    assert leaving == [first + 94 * KIB, second + 94 * KIB]


def test_no_more_than_the_devices_have() -> None:
    first, second = PLAN.estimate.peak_bytes
    capacity = first + 4000 + 7, second + 5
    found = with_messages_held(CHAIN, PLAN, PROCESSES, capacity).estimate
    assert found.ahead_bytes == (7, 0)
    assert found.peak_bytes == capacity
