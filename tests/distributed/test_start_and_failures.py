"""Ranks that don't fit each other don't start; where one fails, all say which, and end."""

import json
import sys

import jobs
import pytest
import torch
import toys
from safetensors.torch import save_file

from fxpipe.errors import InputError
from fxpipe.runtime import load


def test_without_torchrun_the_error_says_how_to_start(tmp_path):
    toys.write(tmp_path, toys.CHAIN)
    with pytest.raises(InputError, match="torchrun --nproc-per-node"):
        load(tmp_path, distributed=True)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), float("nan")])
def test_a_time_limit_is_a_number_of_seconds(tmp_path, timeout_s):
    toys.write(tmp_path, toys.CHAIN)
    with pytest.raises(InputError, match=f"timeout_s is {timeout_s}: give seconds above 0"):
        load(tmp_path, distributed=True, timeout_s=timeout_s)


def test_another_number_of_processes_than_devices_is_refused(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN)
    (error, other) = two.run(jobs.refused, tmp_path)
    assert error == other
    assert "compiled for 3 devices, 2 processes run it" in error
    assert "--nproc-per-node 3" in error


def test_a_batch_norm_over_all_processes_is_refused(two, tmp_path):
    """It would wait for the other stages, which have none of it."""
    toys.write(tmp_path, toys.NORMED, devices=(0, 1))
    for file in tmp_path.glob("stage_*.py"):
        file.write_text(file.read_text().replace("nn.BatchNorm1d", "nn.SyncBatchNorm"))
    (error, other) = two.run(jobs.refused, tmp_path)
    assert error == other
    assert "'bn' in stage_0.py is a SyncBatchNorm" in error
    assert "compile the model without convert_sync_batchnorm" in error


def test_packages_that_differ_are_refused_with_both_values(two, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, m in zip(folders, (2, 4), strict=True):
        folder.mkdir()
        toys.write(folder, toys.EARLY, m)
    (error, other) = two.run(jobs.refused_folder, folders)
    assert error == other
    assert "the ranks of this pipeline differ" in error
    for file in ("plan.json", "schedule.csv"):
        assert f"{file}: rank 0 has " in error
    assert "stage_0.py" not in error


def test_options_that_differ_are_refused_with_both_values(two, tmp_path):
    toys.write(tmp_path, toys.EARLY, devices=(0, 1))
    option = "deferred_batch_norm"
    (error, other) = two.run(jobs.refused_options, tmp_path, option, (True, False))
    assert error == other
    assert f"{option}: rank 0 has True, rank 1 has False" in error


def test_a_file_missing_on_one_rank_is_refused_by_all(two, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        toys.write(folder, toys.EARLY)
    (folders[1] / "stage_1.py").unlink()
    (error, other) = two.run(jobs.refused_folder, folders)
    assert error == other
    assert "rank 1: " in error
    assert "stage_1.py is missing" in error


def test_the_buffers_values_missing_on_one_rank_are_refused_by_all(two, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        toys.write(folder, toys.NORMED)
        plan = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").write_text(json.dumps({**plan, "files": {"buffers.pt": "hash"}}))
    torch.save({"bn.running_mean": torch.zeros(8)}, folders[0] / "buffers.pt")
    (error, other) = two.run(jobs.refused_folder, folders)
    assert error == other
    assert "rank 1: " in error
    assert "buffers.pt is missing" in error
    assert "rank 0: " not in error


def test_weights_that_one_rank_can_not_read_are_refused_by_all(two, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        toys.write(folder, toys.EARLY)
        (folder / "weights").mkdir()
        save_file(toys.EARLY.model().state_dict(), folder / "weights" / "all.safetensors")
    assert two.run(jobs.refused_folder, folders) == ["loaded"] * 2
    path = folders[1] / "weights" / "all.safetensors"
    for harm, why in ((lambda: path.write_bytes(b"junk"), "can't be read"), (path.unlink, "no .s")):
        harm()
        (error, other) = two.run(jobs.refused_folder, folders)
        assert error == other
        assert error.startswith("WeightsError: weights were loaded on no rank:\nrank 1: ")
        assert why in error


def test_backends_that_differ_are_refused_with_both_values(two, tmp_path):
    toys.write(tmp_path, toys.EARLY)
    backends = ("cpu:gloo", "cpu:gloo,cuda:gloo")
    (error, other) = two.run(jobs.refused_settings, tmp_path, "dist.get_backend_config", backends)
    assert error == other
    assert (
        "backend of torch.distributed: rank 0 has cpu:gloo, rank 1 has cpu:gloo,cuda:gloo" in error
    )


def test_a_backend_that_does_not_carry_the_devices_tensors_is_refused(two, tmp_path):
    toys.write(tmp_path, toys.EARLY)
    backends = ("cuda:nccl", "cuda:nccl")
    (error, other) = two.run(jobs.refused_settings, tmp_path, "dist.get_backend_config", backends)
    assert error == other
    for rank in (0, 1):
        assert f"rank {rank}: torch.distributed was set up with nccl, which carries" in error
    assert "tensors on cuda; this process's are on cpu" in error


def test_a_device_used_twice_is_refused_but_a_cpu_may_be(two, tmp_path):
    toys.write(tmp_path, toys.EARLY)
    gpus = ("H100 GPU-1", "H100 GPU-1")
    (error, other) = two.run(jobs.refused_settings, tmp_path, "stream.hardware", gpus)
    assert error == other
    assert "DeviceError: ranks 0 and 1 both run on H100 GPU-1" in error
    different = ("H100 GPU-1", "H100 GPU-2")
    for found in (different, (None, None)):
        assert two.run(jobs.refused_settings, tmp_path, "stream.hardware", found) == ["loaded"] * 2


def test_calls_that_differ_are_refused_alike_and_the_next_goes_on(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    errors, others = two.run(jobs.misused, tmp_path, 4)
    assert errors == others
    rows, shape, missing, modes, graph, scaler, hook, no_grad, graph_on_one = errors
    assert "rank 0 was given inputs of batch 10" in rows
    assert "rank 1 of batch 4" in rows
    assert "rank 1: input 'x' must have shape [batch, 6]" in shape
    assert "rank 0: its stages read x" in missing
    assert "rank 1 is in eval mode, rank 0 in training mode" in modes
    assert "torch.no_grad()" in graph
    assert "as pipe.step(...), rank 0 as pipe.step(..., scaler=scaler): call all" in scaler
    assert "rank 0: the pipeline has a forward hook" in hook
    assert (
        no_grad == "InputError: rank 1: step computes gradients: call it outside of torch.no_grad()"
    )
    assert "InputError: rank 0: over several processes a call makes no graph" in graph_on_one


@pytest.mark.parametrize(("devices", "dp"), [((0, 0, 1), 1), ((0, 0, 0), 2)])
def test_what_one_rank_alone_freezes_is_refused_if_others_hold_it(two, tmp_path, devices, dp):
    toys.write(tmp_path, toys.TIED, 4, devices=devices)
    error, other = two.run(jobs.frozen_in_part, tmp_path, dp)
    assert error == other
    assert "embed.weight is trained on rank 0, frozen on rank 1" in error


@pytest.mark.parametrize(
    ("name", "counts"),
    # The call after the one that differs is another than the last one, too.
    [
        ("chain", [4, 4, 5, 5, 4]),
        ("tied", [4, 4, 5, 5, 4]),
        ("noisy", [4] * 5),
        ("normed", [4] * 5),
    ],
)
def test_a_rank_begins_before_all_agree_where_it_can_begin_again(two, tmp_path, name, counts):
    toys.write(tmp_path, toys.TOYS[name], 4, devices=(0, 1, 1))
    first, last = two.run(jobs.mistaken, tmp_path, name, 4)
    assert first == counts
    assert last == [4] * 5


def test_a_stage_that_fails_on_one_rank_is_named_by_all(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    (heard, again), (own, _) = two.run(jobs.failing, tmp_path, "stage")
    assert own == "StageError: stage 2 failed in 2F2: ValueError: a bad row"
    assert heard == "StageError: rank 1 failed: stage 2 failed in 2F2: ValueError: a bad row"
    assert "start all processes again" in again


def test_an_error_of_any_length_and_letters_is_told_as_far_as_it_says_where(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    (heard, _), (own, _) = two.run(jobs.failing, tmp_path, "garbled")
    where = "stage 2 failed in 2F2: ValueError: a bad row "
    assert own.startswith(f"StageError: {where}\udc80xxx")
    assert heard.startswith(f"StageError: rank 1 failed: {where}\\udc80xxx")
    assert heard.endswith("x... and 29995950 more characters")


def test_a_loss_that_fails_is_named_by_all(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    (heard, _), _ = two.run(jobs.failing, tmp_path, "loss")
    assert "rank 1 failed: loss_fn failed on micro-batch 0: ZeroDivisionError: no rows" in heard


def test_a_call_from_within_a_step_is_refused_on_all(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    (heard, _), _ = two.run(jobs.failing, tmp_path, "inside")
    assert "rank 1 failed: loss_fn failed on micro-batch 0: InputError" in heard
    assert "called while it runs" in heard


def test_another_pipeline_over_the_ranks_within_a_step_is_refused_on_all(two, tmp_path):
    toys.write(tmp_path, toys.CHAIN, 4, devices=(0, 1, 1))
    (heard, _), _ = two.run(jobs.failing, tmp_path, "other")
    assert "rank 1 failed: loss_fn failed on micro-batch 0: InputError" in heard
    assert "on the last stage's rank alone" in heard


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_pipeline_that_is_gone_leaves_no_thread(two, tmp_path):
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 1, 1))
    assert max(two.run(jobs.threads_left, tmp_path)) <= 0
