"""`load_weights`: from files, shards or a folder, only what is held, all of it or nothing."""

import json
import re

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from toys import CHAIN, NORMED, TIED, TOYS, both, same

from fxpipe.errors import WeightsError


def halves(state):
    """Two shards and the index that transformers would write."""
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    tensors = {file: {name: state[name] for name in held} for file, held in shards.items()}
    return tensors, {name: file for file, held in shards.items() for name in held}


def write_shards(folder, state, index="model.safetensors.index.json"):
    folder.mkdir()
    tensors, places = halves(state)
    for file, held in tensors.items():
        save_file(held, folder / file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def changed(model):
    """The weights of a trained model, each tensor once."""
    names = dict(model.named_parameters()) | dict(model.named_buffers())
    state = {name: t for name, t in model.state_dict().items() if name in names}
    return {name: t * 2 if t.is_floating_point() else t + 1 for name, t in state.items()}


def equal(pipe, state):
    found = pipe.state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("name", TOYS)
def test_a_file_with_the_originals_names(tmp_path, name):
    model, pipe = both(tmp_path, TOYS[name])
    state = changed(model)
    save_file(state, tmp_path / "model.safetensors")
    pipe.load_weights(tmp_path / "model.safetensors")
    assert equal(pipe, state)
    model.load_state_dict(pipe.state_dict())
    assert equal(model, state)


@pytest.mark.parametrize("path", ["", "model.safetensors.index.json"])
def test_shards_with_their_index(tmp_path, path):
    model, pipe = both(tmp_path, NORMED)
    state = changed(model)
    write_shards(tmp_path / "trained", state)
    pipe.load_weights(tmp_path / "trained" / path)
    assert equal(pipe, state)


def test_an_index_may_name_a_file_that_is_called_as_one_without_an_index(tmp_path):
    model, pipe = both(tmp_path, NORMED)
    state = changed(model)
    index = write_shards(tmp_path / "trained", state) / "model.safetensors.index.json"
    (tmp_path / "trained/a.safetensors").rename(tmp_path / "trained/model.safetensors")
    index.write_text(index.read_text().replace("a.safetensors", "model.safetensors"))
    pipe.load_weights(tmp_path / "trained")
    assert equal(pipe, state)


def test_files_side_by_side(tmp_path):
    model, pipe = both(tmp_path, NORMED)
    state = changed(model)
    (write_shards(tmp_path / "trained", state) / "model.safetensors.index.json").unlink()
    pipe.load_weights(tmp_path / "trained")
    assert equal(pipe, state)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_weight_under_any_of_its_names(tmp_path, name):
    model, pipe = both(tmp_path, TIED)
    state = changed(model)
    state[name] = state.pop("embed.weight")
    save_file(state, tmp_path / "model.safetensors")
    pipe.load_weights(tmp_path / "model.safetensors")
    assert torch.equal(pipe.embed.weight, state[name])
    assert pipe.head.weight is pipe.embed.weight
    model.load_state_dict(pipe.state_dict())
    assert same(pipe(*TIED.inputs()), model(*TIED.inputs()))


def test_values_come_in_the_pipelines_dtype(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    state = {name: tensor.half() for name, tensor in changed(model).items()}
    save_file(state, tmp_path / "model.safetensors")
    pipe.load_weights(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in pipe.parameters()} == {torch.float64}
    assert equal(pipe, {name: tensor.double() for name, tensor in state.items()})


class Spy:
    """Stands for `safe_open` and notes what is opened and read."""

    opened, read = [], []

    def __init__(self, file, framework):
        Spy.opened.append(file.name)
        self._file = safetensors_open(file, framework=framework)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def keys(self):
        return self._file.keys()

    def get_slice(self, key):
        return self._file.get_slice(key)

    def get_tensor(self, key):
        Spy.read.append(key)
        return self._file.get_tensor(key)


safetensors_open = safetensors.safe_open


def test_only_what_is_held_is_read_and_each_once(tmp_path, monkeypatch):
    model, pipe = both(tmp_path, TIED)
    state = changed(model)
    folder = write_shards(tmp_path / "trained", state)
    places = json.loads((folder / "model.safetensors.index.json").read_text())
    save_file({"encoder.weight": torch.zeros(9)}, folder / "c.safetensors")
    places["weight_map"]["encoder.weight"] = "c.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    monkeypatch.setattr(safetensors, "safe_open", Spy)
    monkeypatch.setattr(Spy, "opened", [])
    monkeypatch.setattr(Spy, "read", [])
    pipe.load_weights(folder, strict=False)
    assert equal(pipe, state)
    assert sorted(Spy.opened) == ["a.safetensors", "b.safetensors"]
    assert sorted(Spy.read) == sorted(state)


def spoiled(state, drop=(), add=(), shape=()):
    state = {name: tensor for name, tensor in state.items() if name not in drop}
    return state | dict.fromkeys(add, torch.zeros(1)) | dict.fromkeys(shape, torch.zeros(2, 2))


def test_all_that_is_wrong_is_told_and_nothing_is_read(tmp_path, monkeypatch):
    model, pipe = both(tmp_path, CHAIN)
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    wrong = spoiled(changed(model), ["first.bias"], ["other"], ["first.weight"])
    save_file(wrong, tmp_path / "model.safetensors")
    monkeypatch.setattr(safetensors, "safe_open", Spy)
    monkeypatch.setattr(Spy, "read", [])
    with pytest.raises(WeightsError) as error:
        pipe.load_weights(tmp_path / "model.safetensors")
    for part in ("1 missing: first.bias", "1 unexpected: other", "expected [7, 6], found [2, 2]"):
        assert part in str(error.value)
    assert Spy.read == []
    assert equal(pipe, before)


def test_names_with_another_prefix_are_told(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    state = changed(model)
    save_file({f"model.{name}": t for name, t in state.items()}, tmp_path / "long.safetensors")
    with pytest.raises(WeightsError, match=r"names here have 'model\.' in front"):
        pipe.load_weights(tmp_path / "long.safetensors")
    state = {name.removeprefix("body."): tensor for name, tensor in state.items()}
    save_file(state, tmp_path / "short.safetensors")
    with pytest.raises(WeightsError, match=r"names here lack 'body\.' in front: stages\.bias"):
        pipe.load_weights(tmp_path / "short.safetensors")


def no_shard(folder):
    (folder / "b.safetensors").unlink()


def two_indexes(folder):
    (folder / "model.fp16.safetensors.index.json").write_text("{}")


def twice(folder):
    (folder / "model.safetensors.index.json").unlink()
    (folder / "c.safetensors").write_bytes((folder / "a.safetensors").read_bytes())


def cut_short(folder):
    (folder / "a.safetensors").write_bytes((folder / "a.safetensors").read_bytes()[:-8])


def replaced(folder):
    save_file({"other": torch.zeros(1)}, folder / "a.safetensors")


def elsewhere(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("a.safetensors", "../a.safetensors"))


def no_json(folder):
    (folder / "model.safetensors.index.json").write_text("[]")


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


UNREADABLE = {
    no_shard: "1 files that are not there: b.safetensors",
    two_indexes: "2 indexes: give one",
    twice: "twice, in a.safetensors and in c.safetensors",
    cut_short: "a.safetensors can't be read as safetensors",
    replaced: "a.safetensors: first.bias can't be read",
    elsewhere: "'../a.safetensors' is not the name of a file beside it",
    no_json: "is no index of safetensors files",
    empty: "has no .safetensors files",
}


@pytest.mark.parametrize("damage", UNREADABLE, ids=lambda damage: damage.__name__)
def test_files_that_are_no_weights(tmp_path, damage):
    model, pipe = both(tmp_path, CHAIN)
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    folder = write_shards(tmp_path / "trained", changed(model))
    damage(folder)
    with pytest.raises(WeightsError, match=re.escape(UNREADABLE[damage])):
        pipe.load_weights(folder)
    assert equal(pipe, before)
    with pytest.raises(WeightsError, match="can't be read"):
        pipe.load_weights(tmp_path / "nowhere.safetensors")
