"""Ranks write safetensors together: each its own shards, or all one file; others read them."""

import json

import jobs
import pytest
import torch
import toys
from safetensors.torch import load_file, save_file


@pytest.mark.parametrize(("name", "devices"), [("tied", (1, 0, 0)), ("normed", (0, 1))])
def test_what_two_ranks_save_another_plan_reads(two, tmp_path, name, devices):
    toy = toys.TOYS[name]
    toys.write(tmp_path, toy, 3, devices=devices)
    folder, file = tmp_path / "trained", tmp_path / "one" / "all.safetensors"
    wrote = two.run(jobs.weights_saved, tmp_path, name, [folder, file])
    shards = [path.name for path in folder.glob("*.safetensors")]
    # Each rank its own, and the single file the first.
    assert sorted(wrote[0] + wrote[1]) == sorted([*shards, file.name])
    assert all(wrote)
    assert file.name in wrote[0]
    (tmp_path / "other").mkdir()
    model, pipe = toys.both(tmp_path / "other", toy, m=3)
    for path in (folder, file):
        for tensor in pipe.state_dict().values():
            tensor.zero_()
        pipe.load_weights(path)
        state = model.state_dict()
        assert all(torch.equal(t, state[key]) for key, t in pipe.state_dict().items())
    # Of a tied weight one is written, and by one rank.
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    once = {key for key in state if key not in dict(toy.aliases)}
    assert set(places) == set(load_file(file)) == once


def test_of_replicas_the_first_writes(four, tmp_path):
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 1, 0))
    folder, file = tmp_path / "trained", tmp_path / "all.safetensors"
    wrote = four.run(jobs.weights_saved, tmp_path, "tied", [folder, file], 2)
    assert [bool(files) for files in wrote] == [True, True, False, False]


def test_where_one_rank_fails_all_say_so_and_what_was_there_stays(two, tmp_path):
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 1, 1))
    error, other = two.run(jobs.weights_not_saved, tmp_path, tmp_path / "trained")
    assert error == other
    assert "rank 1: [Errno 28] No space left on device" in error
    assert "on a file system that they share" in error
    files = sorted(path.name for path in (tmp_path / "trained").iterdir())
    assert files == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_all_ranks_refuse_weights_that_do_not_fit_one(two, tmp_path):
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 1, 0))
    state = toys.TIED.model().state_dict()
    save_file({"embed.weight": state["embed.weight"]}, tmp_path / "lacking.safetensors")
    errors, others = two.run(jobs.weights_refused, tmp_path, tmp_path / "lacking.safetensors")
    assert errors == others
    gone, missing, misshapen = errors
    assert "2 missing: mid.weight, mid.bias" in gone
    assert "1 missing: mid.weight" in missing
    assert "1 of another shape: mid.bias: expected [6], found [3]" in misshapen


def test_where_one_rank_can_not_read_weights_no_rank_loads_any(two, tmp_path):
    toys.write(tmp_path, toys.TIED, 3, devices=(0, 1, 0))
    state = {name: tensor.contiguous() for name, tensor in toys.TIED.model().state_dict().items()}
    state.pop("head.weight")
    whole, cut, gone = (tmp_path / f"{name}.safetensors" for name in ("whole", "cut", "gone"))
    save_file(state, whole)
    cut.write_bytes(whole.read_bytes()[:-8])
    for bad, why in ((cut, "can't be read as safetensors"), (gone, "No such file")):
        (error, *its), other = two.run(jobs.weights_of_its_own, tmp_path, [whole, bad])
        assert other == (error, *its)
        assert error.startswith(f"weights were loaded on no rank:\nrank 1: {bad}")
        assert why in error
        assert its == [False]
    assert two.run(jobs.weights_of_its_own, tmp_path, [whole, whole]) == [("loaded", True)] * 2
