"""What libraries hold of each device is no room for stages, and is counted in all that is told."""

from dataclasses import replace

import models
import pytest
import torch

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.ir import Block, Chain, Link, Network, Value
from fxpipe.planned import planned, weighed_against
from fxpipe.question import Question
from fxpipe.settings import table_of

KIB = 1024
BLOCKS = tuple(Block((f"b{k}",), 1.0, 2.0, saved=((f"s{k}", 10 * KIB),)) for k in range(8))
VALUES = tuple(Value(f"v{k}", 1, k, (k + 1,), gradient=True) for k in range(8))
BARE = Question(
    chain=Chain(BLOCKS, VALUES, (True,) * 8),
    n_devices=2,
    n_microbatches=4,
    network=Network(Link(0.01, 1e5)),
    capacity_bytes=(KIB**3,) * 2,
    training_factor=1.0,
)
HELD = 5 * KIB
HOLDS = replace(BARE, chain=replace(BARE.chain, library_bytes=HELD))


def plan(question, schedule):
    table = table_of(schedule, 2, 4, None)
    return planned(question, schedule, table, time_limit_s=0.2, workers=1)


def with_room(question, n_bytes):
    return replace(question, capacity_bytes=(n_bytes,) * 2)


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_peaks_and_memory_over_time_count_it(schedule):
    bare, holds = (plan(question, schedule).estimate for question in (BARE, HOLDS))
    assert holds.peak_bytes == tuple(peak + HELD for peak in bare.peak_bytes)
    assert holds.memory == tuple(
        tuple((ms, n_bytes + HELD) for ms, n_bytes in held) for held in bare.memory
    )


def test_stages_have_so_much_less_room():
    # In 1F1B stage 0 keeps two micro-batches, stage 1 one: even stages would need 80 KiB.
    roomy, tight = (plan(with_room(HOLDS, n * KIB), "1f1b") for n in (90, 80))
    assert (roomy.cuts, tight.cuts) == ((4,), (3,))
    assert max(tight.estimate.peak_bytes) <= 80 * KIB


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        ("1f1b", r"device . needs \d\d\.00 KiB and has 40\.00 KiB"),
        ("auto", r"device . needs \d\d\.00 KiB at ..\d and has 40\.00 KiB, \d+\.00 KiB less"),
    ],
)
def test_what_does_not_fit_is_told_with_all_that_a_device_has(schedule, says):
    with pytest.raises(PlanError, match=says):
        plan(with_room(HOLDS, 40 * KIB), schedule)


def test_libraries_that_take_all_are_named():
    with pytest.raises(PlanError, match=r"device 0 has 5\.00 KiB, and libraries .* 5\.00 KiB: use"):
        plan(with_room(HOLDS, HELD), "1f1b")


def test_what_a_plan_is_weighed_against_counts_it_too():
    room = max(one.peak_bytes for one in weighed_against(BARE))
    for bare, holds in zip(weighed_against(BARE), weighed_against(HOLDS), strict=True):
        assert holds == replace(bare, peak_bytes=bare.peak_bytes + HELD)
    assert not all(one.fits for one in weighed_against(with_room(HOLDS, room)))


def test_a_package_is_planned_with_what_the_profile_says():
    def peaks(profile):
        package = fxpipe.compile(
            models.Chain(), (torch.randn(8, 6),), devices="cpu*2", microbatches=2, profile=profile
        )
        return package.profile, package.manifest.estimate.peak_bytes

    measured, bare = peaks(None)
    assert measured.library_bytes == 0
    _, holds = peaks(replace(measured, library_bytes=HELD))
    assert holds == tuple(peak + HELD for peak in bare)
