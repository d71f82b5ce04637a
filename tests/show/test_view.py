"""A step is looked at as plan.json has it."""

from dataclasses import replace

import pytest
from plans import TIMELINE, stepped

from fxpipe.errors import InputError
from fxpipe.runtime.trace import Event
from fxpipe.show import view
from fxpipe.show.boxes import boxes, kinds


def events(*found: tuple[int, str, str, float, float]) -> list[Event]:
    return [Event(*one) for one in found]


def test_a_backward_that_takes_longer_than_the_stages_recomputes():
    seen = view.predicted(stepped())
    again = [event for event in seen.events if event.kind == "recompute"]
    # I and W take 4 ms, 3 of them are the backward.
    assert again == events((0, "again 0F0", "recompute", 7.0, 8.0))


@pytest.mark.parametrize(("checkpoint", "again_ms"), [("never", []), ("always", [1.0])])
def test_a_backward_that_waits_for_its_host_recomputes_no_more_than_the_forward(
    checkpoint, again_ms
):
    planned = stepped()
    first = replace(planned.stages[0], checkpoint=checkpoint, backward_ms=1.5)
    seen = view.predicted(replace(planned, stages=(first, *planned.stages[1:])))
    again = [event for event in seen.inside["0I0"] if event.kind == "recompute"]
    assert [event.end_ms - event.start_ms for event in again] == again_ms


def test_the_loss_comes_before_what_the_last_stage_recomputes():
    planned = stepped()
    stages = (*planned.stages[:2], replace(planned.stages[2], backward_ms=1.5))
    estimate = replace(planned.estimate, loss_ms=0.25)
    seen = view.predicted(replace(planned, stages=stages, estimate=estimate))
    inside = seen.inside["2B0"]
    assert inside == (
        *events((0, "loss 0", "loss", 3.0, 3.25), (0, "again 2F0", "recompute", 3.25, 3.75)),
    )
    assert [event.name for event in seen.events if event.kind == "loss"] == ["loss 0"]


def test_the_prediction_has_length_bubble_memory_and_critical_path():
    seen = view.predicted(stepped())
    assert seen.step_ms == 11.0
    assert seen.bubble == pytest.approx(1 - (8 + 3) / 22)
    assert seen.memory == (((0.0, 1), (2.0, 3)), ((1.0, 2),))
    assert seen.critical == ("0F0", "1F0")


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeline": ("", "")},
        {"timeline": TIMELINE[:1]},
        {"timeline": ("0F0 1.0", "")},
        {"memory": ("0 1", "0 one")},
        {"memory": ("0 1",)},
        {"memory": ("0 1", "")},
        {"critical": ("7F7",)},
    ],
)
def test_a_plan_whose_step_cannot_be_read_is_refused(wrong):
    plan = stepped()
    with pytest.raises(InputError, match="compile the package again"):
        view.predicted(replace(plan, estimate=replace(plan.estimate, **wrong)))


def test_numbers_stand_where_nothing_else_does():
    drawn = {box.name: box for box in boxes(view.predicted(stepped()))}
    assert drawn["0I0"].number == "0"
    assert drawn["0I0"].room == (8.0, 10.0)  # behind the recomputation
    assert drawn["again 0F0"].number == ""


def test_stages_of_one_device_differ_in_shade():
    drawn = {box.name: box for box in boxes(view.predicted(stepped()))}
    assert drawn["0F0"].color == drawn["1F0"].color != drawn["2F0"].color


def test_the_legend_has_what_is_there():
    assert kinds(view.predicted(stepped())) == ("F", "B", "I", "W", "recompute")


def test_capacities_that_are_near_are_limits():
    plan = stepped()
    estimate = replace(plan.estimate, capacity_bytes=(4, 2**30))
    assert view.predicted(replace(plan, estimate=estimate)).limits == (4,)
    assert view.predicted(plan).limits == ()
