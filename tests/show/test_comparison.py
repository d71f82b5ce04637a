"""Figures of a step: what is counted once, and what stands beside what."""

from dataclasses import replace
from textwrap import dedent

import pytest
from plans import stepped
from rich.console import Console

from fxpipe.runtime.trace import Event
from fxpipe.show import view
from fxpipe.show.comparison import Figure, compare, comparison_json, comparison_table, figures


def test_figures_of_a_step():
    assert figures(view.predicted(stepped())) == pytest.approx(
        {
            ("step", "time"): 11.0,
            ("step", "bubble"): 0.5,
            ("stage 0", "forward"): 1.0,
            ("stage 0", "backward"): 3.0,  # both halves, and what is recomputed is apart
            ("stage 1", "forward"): 1.0,
            ("stage 1", "backward"): 2.0,
            ("stage 2", "forward"): 1.0,
            ("stage 2", "backward"): 2.0,
            ("all stages", "forward"): 3.0,
            ("all stages", "backward"): 4.0,
            ("all stages", "gradients of inputs"): 2.0,
            ("all stages", "gradients of weights"): 1.0,
            ("all stages", "recomputation"): 1.0,
            ("device 0", "busy"): 8.0,
            ("device 0", "bubble"): 3 / 11,
            ("device 1", "busy"): 3.0,
            ("device 1", "bubble"): 8 / 11,
        }
    )


def test_the_loss_is_no_part_of_a_forward_and_copies_are_none_of_anything():
    seen = view.predicted(stepped())
    loss = Event(0, "loss 0", "loss", 2.5, 3.0)
    copy = Event(0, "0 to 1", "copy", 1.0, 1.5)
    found = figures(replace(seen, events=(*seen.events[:3], loss, *seen.events[3:], copy)))
    assert found["stage 2", "forward"] == 0.5
    assert found["all stages", "loss"] == 0.5
    assert found["device 0", "busy"] == 8.0


def test_of_several_steps_the_median_counts():
    key = ("step", "time")
    assert compare({key: 3.0}, [{key: 2.0}, {key: 9.0}, {key: 4.0}]) == (
        Figure("step", "time", "ms", 3.0, 4.0),
    )


def test_a_side_that_knows_nothing_stays_empty():
    found = compare({("device 0", "peak memory"): 8.0}, [{("all stages", "loss"): 1.0}])
    assert found == (
        Figure("device 0", "peak memory", "bytes", 8.0, None),
        Figure("all stages", "loss", "ms", None, 1.0),
    )
    assert [figure.off for figure in found] == [None, None]


FOUND = (
    Figure("step", "time", "ms", 90.0, 100.0),
    Figure("step", "bubble", "share", 0.25, 0.3),
    Figure("device 0", "busy", "ms", 9.0, None),
    Figure("device 0", "peak memory", "bytes", 2048, 1024),
)


def test_a_little_less_than_nothing_is_nothing():
    assert Figure("step", "time", "ms", 99.9, 100.0).texts[2] == "+0%"
    assert Figure("step", "bubble", "share", -1e-9, 0.3).texts[0] == "0%"


def test_table():
    console = Console(width=100, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(comparison_table(FOUND))
    assert "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n" == dedent("""\
                               predicted  measured    off
        step      time           90.0 ms    100 ms   -10%
                  bubble             25%       30%
        device 0  busy           9.00 ms
                  peak memory    2.0 KiB   1.0 KiB  +100%
        """)


def test_json_has_numbers_and_how_far_they_are_apart():
    assert comparison_json(FOUND)[0] == {
        "of": "step",
        "name": "time",
        "unit": "ms",
        "predicted": 90.0,
        "measured": 100.0,
        "off": pytest.approx(-0.1),
    }
