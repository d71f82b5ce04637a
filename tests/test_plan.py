"""`fxpipe plan`: a bare chain's file, what is wrong with one, and what is printed."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fxpipe.chain_file import load_chain
from fxpipe.cli import app
from fxpipe.errors import InputError
from fxpipe.passes.partition_stages import stage_costs
from fxpipe.passes.simulate_costs import Message

BLOCK = {
    "forward_ms": 1.0,
    "input_gradient_ms": 2.0,
    "weight_gradient_ms": 4.0,
    "saved_bytes": 8,
    "parameter_bytes": 16,
    "output_bytes": 32,
}
CHAIN: dict[str, Any] = {
    "blocks": [BLOCK] * 6,
    "skips": [{"from": 0, "to": 5, "bytes": 64}],
    "capacity_bytes": 10_000,
    "optimizer_bytes_per_parameter_byte": 3,
    "latency_ms": 0.5,
    "bandwidth_gb_s": 2,
}


def written(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "chain.json"
    data = {key: value for key, value in (CHAIN | changes).items() if value is not None}
    path.write_text(json.dumps(data))
    return path


def plan(*arguments: object) -> dict[str, Any]:
    command = ["plan", *map(str, arguments), "--time-limit", "0.2", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_chain_costs_what_its_file_says(tmp_path: Path) -> None:
    file = load_chain(written(tmp_path))

    stages, messages = stage_costs(file.chain, (2, 4), file.training_factor)

    assert [stage.forward_ms for stage in stages] == [2.0] * 3
    assert [stage.backward_ms for stage in stages] == [12.0] * 3
    # Block 0 computes the gradient of its inputs, as the file says.
    assert [stage.weight_gradient_ms for stage in stages] == [8.0] * 3
    assert [stage.saved_bytes for stage in stages] == [16] * 3
    assert [stage.static_bytes for stage in stages] == [2 * 16 * 4] * 3
    assert [stage.forward_workspace_bytes + stage.input_bytes for stage in stages] == [0] * 3
    # The boundary's bytes to the next stage, the skip's straight to its reader; both come back.
    assert messages == (Message(0, 1, 32, 32), Message(0, 2, 64, 64), Message(1, 2, 32, 32))
    assert file.network.link.transfer_ms(4_000_000) == pytest.approx(0.5 + 2.0)
    assert file.capacity_bytes == 10_000


def test_skips_capacity_and_optimizer_may_be_left_out(tmp_path: Path) -> None:
    absent = dict.fromkeys(("skips", "capacity_bytes", "optimizer_bytes_per_parameter_byte"))

    file = load_chain(written(tmp_path, **absent))

    assert file.training_factor == 0
    assert file.capacity_bytes > 10**18


def test_bytes_are_whole_however_they_are_written(tmp_path: Path) -> None:
    blocks = [BLOCK | {"saved_bytes": 1e6}] * 6
    file = load_chain(written(tmp_path, blocks=blocks, capacity_bytes=1e9))

    assert file.chain.blocks[0].saved[0][1] == 1_000_000
    assert file.capacity_bytes == 1_000_000_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": []}, "`blocks` is a list of at least one block"),
        ({"blocks": [BLOCK | {"forward_ms": -1}]}, "forward_ms of block 0 is a number from 0 to"),
        ({"blocks": [BLOCK | {"forward_ms": 10**400}]}, "forward_ms of block 0 is a number"),
        ({"blocks": [BLOCK | {"forward_ms": 1e308}]}, "forward_ms of block 0 is a number"),
        ({"blocks": [BLOCK | {"saved_bytes": 10**30}]}, "saved_bytes of block 0 is a number"),
        ({"blocks": [BLOCK | {"parameter_bytes": 2**63}]}, "parameter_bytes of block 0 is a"),
        ({"blocks": [BLOCK | {"saved_bytes": math.nan}]}, "saved_bytes of block 0 is a number"),
        (
            {"blocks": [BLOCK | {"saved_bytes": 1.5}]},
            "saved_bytes of block 0 is a whole number, not",
        ),
        ({"skips": [{"from": 0, "to": 5, "bytes": 0.5}]}, "bytes of skip 0 is a whole number"),
        ({"capacity_bytes": 9.5}, "capacity_bytes is a whole number, not 9.5"),
        ({"blocks": [{"forward_ms": 1}]}, "block 0 lacks input_gradient_ms, weight_gradient_ms"),
        ({"blocks": [BLOCK | {"cost": 1}]}, "block 0 has cost, which mean nothing here"),
        ({"skips": [{"from": 3, "to": 3, "bytes": 1}]}, "skip 0 goes from block 3 to block 3"),
        ({"skips": [{"from": 3, "to": 6, "bytes": 1}]}, "to a later one of the blocks 0 to 5"),
        ({"skips": [{"from": False, "to": True, "bytes": 1}]}, "from block False to block True"),
        ({"capacity_bytes": 0}, "capacity_bytes is a number from 1 to"),
        ({"capacity_bytes": 1e308}, "capacity_bytes is a number from 1 to"),
        ({"bandwidth_gb_s": 0}, "bandwidth_gb_s is a number from 1e-06 to 1e+09, not 0"),
        ({"latency_ms": None}, "the file lacks latency_ms"),
    ],
)
def test_what_is_wrong_with_a_chain_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as error:
        load_chain(written(tmp_path, **changes))

    assert message in str(error.value)
    assert "chain.json" in str(error.value)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("blocks")

    with pytest.raises(InputError, match=r"text.json is no JSON"):
        load_chain(tmp_path / "text.json")
    with pytest.raises(InputError, match=r"none.json can't be read"):
        load_chain(tmp_path / "none.json")


def test_the_best_plan_and_named_ones_beside_it(tmp_path: Path) -> None:
    facts = plan("--chain", written(tmp_path), "--devices", 2, "--microbatches", 4)

    assert facts["cuts"] == sorted(facts["cuts"])
    assert len(facts["devices"]) == len(facts["cuts"]) + 1
    assert set(facts["devices"]) == {0, 1}
    assert len(facts["schedule"]) == 2
    assert facts["solver"] == "search"
    assert facts["lower_bound_ms"] <= facts["step_ms"]
    assert facts["gap"] == pytest.approx(1 - facts["lower_bound_ms"] / facts["step_ms"])
    assert len(facts["peak_bytes"]) == 2
    assert {"bubble", "seconds"} <= set(facts)
    steps = {one["name"]: one.get("step_ms", math.inf) for one in facts["candidates"]}
    assert {"gpipe", "1f1b", "zb-h1", "zb-v"} <= set(steps)
    assert facts["step_ms"] <= min(steps.values()) * (1 + 1e-9)


def test_one_device_alone_is_told_where_messages_take_longer(tmp_path: Path) -> None:
    asked = ["--devices", "2", "--microbatches", "4", "--schedule", "gpipe"]
    told = {}
    for latency_ms in (0.0, 1000.0):
        chain = str(written(tmp_path, latency_ms=latency_ms))
        # Six blocks of 7 ms, four micro-batches.
        assert plan("--chain", chain, *asked)["one_device_ms"] == pytest.approx(168.0)
        told[latency_ms] = CliRunner().invoke(app, ["plan", "--chain", chain, *asked]).stdout

    assert "one device alone takes 168 ms" in told[1000.0]
    assert "alone" not in told[0.0]


def test_one_device_that_is_too_small_is_none(tmp_path: Path) -> None:
    chain = written(tmp_path, capacity_bytes=420)

    facts = plan("--chain", chain, "--devices", 2, "--microbatches", 4, "--schedule", "1f1b")

    assert facts["one_device_ms"] is None


def test_the_devices_of_a_chain_need_not_be_here(tmp_path: Path) -> None:
    asked = ("--chain", written(tmp_path), "--microbatches", 2, "--schedule", "gpipe")
    assert plan(*asked, "--devices", "cuda:98,cuda:99")["devices"] == [0, 1]


def test_one_schedule_alone(tmp_path: Path) -> None:
    facts = plan(
        "--chain", written(tmp_path), "--devices", 2, "--microbatches", 2, "--schedule", "gpipe"
    )

    assert facts["schedule"] == [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]]
    assert facts["solver"] == "dp"  # as `compile` would cut it: nothing is left to a search
    assert facts["gap"] == pytest.approx(1 - facts["lower_bound_ms"] / facts["step_ms"])
    assert "candidates" not in facts


def test_a_table_of_ones_own_says_how_many_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n")

    facts = plan("--chain", written(tmp_path), "--devices", 2, "--schedule", "mine.csv")

    assert facts["schedule"][0] == ["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"]


def test_blocks_are_computed_again_when_asked_for(tmp_path: Path) -> None:
    blocks = [BLOCK | {"saved_bytes": 1000}] * 6
    path = written(tmp_path, blocks=blocks, capacity_bytes=5000)

    facts = plan(
        "--chain", path, "--devices", 2, "--microbatches", 4, "--schedule", "1f1b",
        "--checkpoint", "auto",
    )  # fmt: skip

    runs = [run for runs in facts["recomputed"] for run in runs]
    assert sum(end - begin for begin, end in runs) * 1.0 == facts["recompute_ms"] > 0
    assert max(facts["peak_bytes"]) <= 5000


def test_named_schedules_compute_blocks_again_too_when_asked_for(tmp_path: Path) -> None:
    blocks = [BLOCK | {"saved_bytes": 1000}] * 6
    path = written(tmp_path, blocks=blocks, capacity_bytes=5000)
    asked = ("--chain", path, "--devices", 2, "--microbatches", 4)

    without = plan(*asked, "--schedule", "gpipe", "--checkpoint", "auto")
    facts = plan(*asked, "--checkpoint", "auto")

    found = {each["name"]: each for each in facts["candidates"]}
    assert found["1f1b"]["step_ms"] > facts["step_ms"]
    assert found["gpipe"]["step_ms"] == pytest.approx(without["step_ms"], rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a TARGET, or --chain FILE.json"),
        (("--chain", "none.json"), "none.json can't be read"),
        (
            ("--chain", "chain.json", "--schedule", "fast"),
            "no schedule 'fast': use one of gpipe",
        ),
        (("--chain", "chain.json", "--batch", "8"), "--batch is of a TARGET"),
        (("--chain", "chain.json", "--profile", "analytic:cpu"), "--profile is of a TARGET"),
        (("--chain", "chain.json", "--optimizer", "adam"), "--optimizer is of a TARGET"),
        (
            ("--chain", "chain.json", "--microbatches", "auto"),
            "auto is of a TARGET: a chain's costs",
        ),
        (("--chain", "chain.json", "--microbatches", "few"), "at least 1, or auto, not 'few'"),
        (("--chain", "chain.json", "--microbatches", "100000000"), "plans have 16777216 at most"),
        (("--chain", "chain.json", "--time-limit", "inf"), "1000000 seconds, not inf"),
    ],
)
def test_wrong_use_is_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(app, ["plan", "--devices", "2", *arguments])

    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory", "much"), "'much' is no amount of memory"),
        (("--topology", "3:nvlink4"), "the topology 3:nvlink4 has 3 devices"),
        (("--schedule", "zb-v", "--loops", "3"), "3 stages a device under zb-v"),
        (("--schedule", "one_row.csv"), "rows: 1, devices: 2"),
        (("--batch", "4", "--microbatches", "5"), "a batch of 4 can't be cut into 5"),
    ],
)
def test_what_can_not_be_planned_is_told_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "one_row.csv").write_text("0F0,0B0\n")
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(app, ["plan", "no_model.py", "--devices", "2", *arguments])

    assert result.exit_code == 2
    assert message in result.stderr


def test_tables_are_for_people(tmp_path: Path) -> None:
    command = ["plan", "--chain", str(written(tmp_path)), "--devices", "2", "--time-limit", "0.1"]

    result = CliRunner().invoke(app, command)

    assert "6 blocks on 2 devices in 4 micro-batches" in result.stdout
    result = CliRunner().invoke(app, [*command, "--microbatches", "1", "--schedule", "1f1b"])
    assert "6 blocks on 2 devices in 1 micro-batch\n" in result.stdout
    assert "no plan of this chain on these devices takes less than" in result.stdout
