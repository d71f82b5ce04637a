"""The same numbers where ranks are on GPUs, each on one of its own if there are as many."""

import jobs
import pytest
import torch
import toys

N_CUDA = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(N_CUDA == 0, reason="this machine has no CUDA device"),
]


@pytest.mark.parametrize("name", ["normed", "early"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "split"])
def test_a_stage_on_each_gpu(two, tmp_path, name, schedule):
    toys.write(tmp_path, toys.TOYS[name], 3, schedule)
    assert two.run(jobs.on_gpus, tmp_path, name, 3, 1) == ["equal"] * 2


@pytest.mark.parametrize("name", ["skips", "tied", "noisy"])
def test_several_stages_on_a_gpu(two, tmp_path, name):
    toy = toys.TOYS[name]
    toys.write(tmp_path, toy, 3, devices=(0, 1, 0, 1)[: len(toy.parts)])
    assert two.run(jobs.on_gpus, tmp_path, name, 3, 1) == ["equal"] * 2


@pytest.mark.parametrize("fully_shard", [False, True])
def test_replicas_on_gpus(two, tmp_path, fully_shard):
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 0, 0))
    assert two.run(jobs.on_gpus, tmp_path, "tied", 3, 2, fully_shard) == ["equal"] * 2
