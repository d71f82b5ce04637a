"""What torchrun starts again goes on from the last whole checkpoint, and ends as if undisturbed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import toys

HERE = Path(__file__).parent


def test_a_run_whose_ranks_are_killed_ends_with_the_same_weights(tmp_path):
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    if torchrun is None:
        pytest.skip("torch was installed without torchrun")
    toys.write(tmp_path, toys.NOISY, 4, devices=(0, 1, 0))
    done = subprocess.run(
        [
            *(torchrun, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"),
            *(str(HERE / "resuming.py"), str(tmp_path), str(tmp_path / "last")),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        said = [line for line in done.stdout.splitlines() if line.startswith(f"rank {rank}")]
        assert said == [
            f"rank {rank} goes on from step 2",
            f"rank {rank} goes on from step 3",
            f"rank {rank} has the same weights",
        ]
