"""On CUDA a trace has the device's times, and memory is what its allocator gave."""

import json

import pytest
import torch
from toys import CHAIN, both, mean_loss

from fxpipe.runtime import load, stream

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def slow_loss(output, target):
    torch.cuda._sleep(20_000_000)  # at least 5 ms of the device's time, and none of the host's
    return mean_loss(output)


def test_times_are_the_devices(tmp_path):
    both(tmp_path, CHAIN)
    pipe = load(tmp_path, ["cuda:0"] * len(CHAIN.parts))
    x = CHAIN.inputs()[0].cuda()
    pipe.step(x, loss_fn=slow_loss)
    with pipe.trace(tmp_path / "step.json"):
        pipe.step(x, loss_fn=slow_loss)
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    losses = [e["dur"] for e in events if e.get("cat") == "loss"]
    assert len(losses) == 4
    assert min(losses) > 5000
    rows = {e["tid"] for e in events if e["ph"] == "X" and e["pid"] == 0}
    assert rows == {2 * lane for lane in range(len(CHAIN.parts))}


def test_copies_to_and_from_the_cpu_are_shown(tmp_path):
    both(tmp_path, CHAIN)
    devices = ["cpu" if j % 2 else "cuda:0" for j in range(len(CHAIN.parts))]
    pipe = load(tmp_path, devices)
    with pipe.trace(tmp_path / "step.json"):
        pipe.step(*CHAIN.inputs(), loss_fn=lambda output, target: mean_loss(output).cuda())
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    copies = [e for e in events if e.get("cat") == "copy"]
    # Each value to the next stage, and each gradient back.
    assert len(copies) == 2 * 4 * (len(CHAIN.parts) - 1)
    assert all(e["dur"] >= 0 for e in copies)


def test_lanes_of_one_gpu_have_one_peak(tmp_path):
    both(tmp_path, CHAIN)
    pipe = load(tmp_path, ["cuda:0"] * len(CHAIN.parts))
    x = CHAIN.inputs()[0].cuda()
    pipe.step(x, loss_fn=mean_loss)
    with pipe.memory() as memory:
        pipe.step(x, loss_fn=mean_loss)
    (peak,) = memory.peaks
    assert peak.lanes == tuple(range(len(CHAIN.parts)))
    held = sum(2 * p.numel() * p.element_size() for p in pipe.parameters())
    assert held <= peak.measured_bytes <= torch.cuda.max_memory_allocated()
    assert peak.measured_bytes == stream.peak_bytes(torch.device("cuda", 0))
