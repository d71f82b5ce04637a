"""What torch.distributed.pipelining can't do right is told before it runs, with the way out."""

import re
from pathlib import Path

import pytest
import toys

from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.portal import Wire
from fxpipe.runtime.torch_pipelining.rules import broken_rules
from fxpipe.schedule import Schedule

NOW = (2, 13)


def told(
    folder: Path, toy: toys.Toy, torch: tuple[int, int] = NOW, unknown: bool = False, **settings
) -> list[str]:
    """The rules that a toy's package breaks; with `unknown`, its batch depends on data."""
    toys.write(folder, toy, **settings)
    plan = (folder / "plan.json").read_text()
    if unknown:
        plan = re.sub(r'"batch",(\s+)7', r'"unknown",\g<1>7', plan)
    manifest = Manifest.from_json(plan)
    values = {
        Wire(j, output.value): output.spec
        for j, stage in enumerate(manifest.stages)
        for output in stage.outputs
    }
    return [*broken_rules(manifest, Schedule.read(folder / "schedule.csv"), values, torch)]


@pytest.mark.parametrize("torch", [(2, 11), (2, 12), NOW])
@pytest.mark.parametrize("name", ["chain", "skips", "normed"])
def test_floats_with_gradients_go_everywhere(tmp_path, name, torch):
    assert told(tmp_path, toys.TOYS[name], torch) == []


def test_random_numbers_and_ties_across_ranks(tmp_path):
    (random,) = told(tmp_path, toys.NOISY)
    assert random.startswith("random numbers in stages 0, 1, 2: ")
    (tie,) = told(tmp_path, toys.TIED, devices=(0, 1, 1))
    assert tie.startswith("embed.weight in stages 0, 2 on ranks 0, 1: ")
    assert told(tmp_path, toys.TIED, devices=(0, 1, 0)) == []


def test_shapes_that_depend_on_data_and_ranks_without_a_stage(tmp_path):
    first, second, *_ = told(tmp_path, toys.CHAIN, unknown=True)
    assert first.startswith("the shape of h float64[unknown, 7] after stage 0 depends on data")
    assert second.startswith("the shape of g float64[unknown, 7] after stage 1 depends on data")
    (idle,) = told(tmp_path, toys.CHAIN, devices=(3, 0, 1))
    assert idle.startswith("rank 2 without a stage")


def test_what_older_versions_of_torch_get_wrong(tmp_path):
    values = [text.partition(" has no")[0] for text in told(tmp_path, toys.WHOLE, (2, 12))]
    assert values == [
        "mask bool[batch, 8] after stage 0",
        "order int64[batch, 8] after stage 0",
        "unused float64[batch, 8] after stage 0",
    ]
    (halves,) = told(tmp_path, toys.CHAIN, (2, 12), schedule="split")
    assert halves.startswith("0I0 and 0W0: torch 2.12 counts the gradient of a weight")
    (neighbours,) = told(tmp_path, toys.CHAIN, (2, 11), devices=(0, 1, 1))
    assert neighbours.startswith("stages 1 and 2 are both on rank 1, and torch 2.11 sends itself")
    assert told(tmp_path, toys.CHAIN, (2, 12), devices=(0, 1, 1)) == []
