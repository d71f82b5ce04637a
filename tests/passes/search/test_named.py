"""Named schedules beside a plan, on cuts of equal time."""

from chains import block, plain

from fxpipe.ir import CheckpointMode, Link, Network
from fxpipe.passes import order
from fxpipe.passes.search.named import candidate, named_plans

FREE = Network(Link(0.0, float("inf")))


def candidates(n_blocks: int, capacity_bytes: int = 10**9):
    blocks = [block(f"b{k}", 1.0, 2.0, 100, weight_gradient_ms=1.0) for k in range(n_blocks)]
    room = (capacity_bytes,) * 2
    found = named_plans(
        plain(blocks, n_bytes=0),
        n_devices=2,
        n_microbatches=8,
        checkpoint=CheckpointMode.NEVER,
        network=FREE,
        capacity_bytes=room,
        training_factor=1.0,
    )
    return {
        one.schedule_name: candidate(one.schedule_name, one.schedule, one.estimate, room)
        for one in found
    }


def test_each_named_schedule_is_weighed() -> None:
    found = candidates(4)
    assert found.keys() == set(order.NAMES)
    assert found["1f1b"].step_ms == 54.0
    assert found["1f1b"].stages == 2
    assert found["zb-h1"].step_ms == 50.0
    assert found["interleaved"].stages == 4
    assert found["gpipe"].peak_bytes > found["1f1b"].peak_bytes
    assert all(one.fits and one.microbatches == 8 for one in found.values())


def test_what_does_not_fit_is_told_and_what_needs_more_blocks_left_out() -> None:
    found = candidates(3, capacity_bytes=900)
    assert {"interleaved", "bfs", "zb-v"}.isdisjoint(found)
    assert not found["gpipe"].fits
    assert found["1f1b"].fits
