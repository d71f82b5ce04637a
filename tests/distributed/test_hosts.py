"""Ranks on two hosts, whose connection is slow and loses packets, or breaks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
import toys

SCRIPT = Path(__file__).with_name("two_hosts.py")


def ends(folder, cable):
    """Of each rank, its exit code and what it has written."""
    toys.write(folder, toys.SKIPS, 4, "1f1b", devices=(0, 1, 0, 1))
    try:
        with hosts.two(cable) as namespaces:
            done = subprocess.run(
                [sys.executable, str(SCRIPT), str(folder), cable, *namespaces],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=150,
            )
    except hosts.NotAllowedError as error:
        pytest.skip(f"this machine can't do that: {error}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("cable", ["netem", "relay"])
def test_the_same_numbers_over_a_bad_connection(tmp_path, cable):
    for code, text in ends(tmp_path, cable):
        assert code == 0, text
        assert text.endswith("equal\n")


def test_a_host_that_is_cut_off_is_missed_and_both_end(tmp_path):
    (code, text), (other_code, other) = ends(tmp_path, "good")
    assert (code, other_code) == (1, 1)
    waits = r"rank 0 waits for \dF\d: stage [13], micro-batch \d, from rank 1, for \d+ s"
    assert re.search(waits, text)
    assert re.search(r"rank 1 is in step 2.*; no sign of life for \d+ s", text)
    assert re.search(r"rank 1 waits for \d[FB]\d: stage [02], micro-batch \d, from rank 0", other)
    assert "The store of torch.distributed doesn't answer" in other
