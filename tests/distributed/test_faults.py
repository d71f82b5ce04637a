"""Where a rank is killed, stopped or never comes, the others say what they wait for, and end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import toys

HERE = Path(__file__).parent
CASES = (
    *("nothing", "failed", "killed", "replica killed", "stopped", "keeper stopped"),
    *("stopped outside", "stopped saving", "slow", "told to end", "absent", "elsewhere"),
    *("killed gathering", "stopped gathering", "a batch fewer"),
)


# Parameters of stage 1 are gathered while 0F3 runs.
ONE_RANK = ",".join(f"{j}F{i}" for j in range(3) for i in range(4)) + ","
ONE_RANK += ",".join(f"{j}B{i}" for j in (2, 1, 0) for i in range(4)) + "\n"


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """By case, the exit code of each of three ranks and what it has written."""
    folder = tmp_path_factory.mktemp("faults")
    toys.write(folder, toys.CHAIN, 4)
    (folder / "replica").mkdir()
    toys.write(folder / "replica", toys.CHAIN, 4, table=ONE_RANK, devices=(0, 0, 0))
    done = subprocess.run(
        [sys.executable, str(HERE / "faults.py"), str(folder), *CASES],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_processes_end_by_themselves(ends):
    assert [code for code, _ in ends["nothing"]] == [0, 0, 0]


def test_all_name_the_action_and_line_that_failed(ends):
    failed = r"stage 1 failed in 1F2, stage_1.py, line \d+: `.*self\..*`: ValueError: a bad row"
    for rank, (code, text) in enumerate(ends["failed"]):
        assert code == 1
        assert re.search(failed if rank == 1 else f"rank 1 failed: {failed}", text)


WAITS_OF_0 = r"rank 0 .*waits for 1B3: stage 1, micro-batch 3, from rank 1, for \d+ s"
WAITS_OF_2 = r"rank 2 .*waits for 1F2: stage 1, micro-batch 2, from rank 1, for \d+ s"
LAST_OF_1 = "rank 1 is in step 2 at 1F2, did 1F0, 1F1 last"


def test_a_killed_rank_is_missed_at_once(ends):
    first, (code, _), last = ends["killed"]
    assert code == -9
    for (code, text), waits in ((first, WAITS_OF_0), (last, WAITS_OF_2)):
        assert code == 1
        assert "has lost rank 1, whose process has ended" in text
        assert re.search(waits, text)
        assert LAST_OF_1 in text


def test_replicas_miss_one_that_is_killed(ends):
    first, (code, _), last = ends["replica killed"]
    assert code == -9
    for code, text in (first, last):
        assert code == 1
        assert re.search(r"rank \d has lost .*, while it waits for the other ranks", text)
        assert "rank 1 is in step 2 at 0F2" in text


def test_a_stopped_rank_is_missed_after_the_time_limit(ends):
    first, (code, _), last = ends["stopped"]
    assert code is None
    for (code, text), waits in ((first, WAITS_OF_0), (last, WAITS_OF_2)):
        assert code == 1
        assert re.search(waits, text)
        assert re.search(LAST_OF_1 + r"; no sign of life for \d+ s", text)
        assert text.count("no sign of life") == 1


def test_a_slow_rank_is_missed_but_lives(ends):
    (code, text), slow, _ = ends["slow"]
    assert code == 1
    assert re.search(WAITS_OF_0, text)
    assert LAST_OF_1 in text
    assert "no sign of life" not in text
    assert slow[0] == 1


def test_who_is_told_to_end_says_what_it_waits_for(ends):
    code, text = ends["told to end"][2]
    assert code == -15
    own = [line for line in text.splitlines(True) if "[c10d]" not in line]  # but torch's warnings
    assert re.fullmatch(
        r"rank 2 is told to end by SIGTERM. rank 2 is in step 2, did 2F0, 2F1 last, "
        r"waits for 1F2: stage 1, micro-batch 2, from rank 1\n",
        "".join(own),
    )


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("killed gathering", "has lost another rank, whose process has ended"),
        ("stopped gathering", r"rank 1 is in step 2 at 0F2, .*; no sign of life for \d+ s"),
    ],
)
def test_a_replica_that_gathers_no_parameters_is_missed(ends, case, why):
    for rank in (0, 2):
        code, text = ends[case][rank]
        assert code == 1
        assert re.search(r"waits for the parameters of stage 1, from its replicas, for \d+ s", text)
        assert re.search(why, text)


def test_the_process_that_keeps_the_store_may_be_the_stopped_one(ends):
    stopped, *others = ends["keeper stopped"]
    assert stopped[0] is None
    for rank, (code, text) in enumerate(others, 1):
        assert code == 1
        assert f"waits for {rank - 1}F2: stage" in text
        assert "The store of torch.distributed doesn't answer" in text
        assert f"rank {rank} is in step 2, did " in text


@pytest.mark.parametrize(
    ("case", "stopped", "work", "last"),
    [
        ("stopped outside", 2, "step 2", "rank 2 is .*step 1"),
        ("stopped saving", 1, "checkpoint.save 1", "rank 1 is "),
        ("elsewhere", 2, "the start, waits for 1 of 3 ranks to call load", "rank 2 has not come"),
    ],
)
def test_what_all_do_together_says_who_is_missing(ends, case, stopped, work, last):
    for rank, (code, text) in enumerate(ends[case]):
        if rank == stopped:
            assert code is None
            continue
        assert code == 1
        assert re.search(rf"rank {rank} waits for (the other|1 of 3) ranks", text)
        assert f"rank {rank} is in {work}" in text
        assert re.search(last + r".*; no sign of life for \d+ s", text)


def test_ranks_that_were_never_started_are_missed_by_torch(ends):
    for code, text in ends["absent"][:2]:
        assert code == 1
        assert "the 3 processes did not meet within 8 s: " in text


def test_a_rank_with_a_batch_fewer_is_named_with_what_it_calls_instead(ends):
    for code, text in ends["a batch fewer"]:
        assert code == 1
        assert "rank 2 is in checkpoint.save, rank 0 in step: all ranks make the same calls" in text
