"""What lanes free, they find again."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from fxpipe.runtime.lanes import Lanes
from fxpipe.runtime.device_names import parse_devices

def step():
    tensors = [torch.zeros(2**20, dtype=torch.uint8) for _ in range(32)]

lanes = Lanes(parse_devices("cpu*2"))
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how glibc's malloc behaves")
def test_the_memory_of_a_step_is_there_in_the_next():
    ran = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    pages = 32 * 2**20 // 4096
    assert int(ran.stdout) < pages // 20
