"""`save_weights`: a file or Hugging Face's shards, read by others, whole or not at all."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from toys import CHAIN, NORMED, TIED, TOYS, both

from fxpipe.errors import InputError, WeightsError
from fxpipe.runtime.weights import tensor_file
from fxpipe.runtime.weights.tensor_file import bytes_of, entries_of, write

SMALL = 300  # bytes of a shard: some tensors of toys fit together, some don't fit at all


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def loaded(folder):
    """All tensors of a folder, by its index if it has one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    places = json.loads(index.read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in places.items()}


def same(found, state):
    return all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("size", ["5GB", SMALL])
@pytest.mark.parametrize("name", TOYS)
def test_the_plain_model_and_another_pipeline_read_it(tmp_path, name, size):
    toy = TOYS[name]
    model, pipe = both(tmp_path, toy)
    pipe.save_weights(tmp_path / "trained", size)
    again = toy.model().double()
    found = loaded(tmp_path / "trained")
    missing, unexpected = again.load_state_dict(found, strict=False)
    assert set(missing) <= {alias for alias, _ in toy.aliases}
    assert unexpected == []
    assert same(again.state_dict(), model.state_dict())
    _, other = both(tmp_path, toy)
    for tensor in other.state_dict().values():
        tensor.zero_()
    other.load_weights(tmp_path / "trained")
    assert same(other.state_dict(), model.state_dict())


def test_a_tied_weight_stands_once_under_its_first_name(tmp_path):
    model, pipe = both(tmp_path, TIED)
    pipe.save_weights(tmp_path / "model.safetensors")
    assert list(load_file(tmp_path / "model.safetensors")) == [
        name for name, _ in model.named_parameters()
    ]
    again = TIED.model().double()
    assert load_model(again, tmp_path / "model.safetensors") == (set(), [])
    assert same(again.state_dict(), model.state_dict())


def test_shards_are_as_large_as_asked_for_and_the_index_says_what_is_where(tmp_path):
    _, pipe = both(tmp_path, NORMED)
    pipe.save_weights(tmp_path / "trained", SMALL)
    *shards, index = names(tmp_path / "trained")
    n = len(shards)
    assert n > 2
    assert shards == [f"model-{k:05}-of-{n:05}.safetensors" for k in range(1, n + 1)]
    assert index == "model.safetensors.index.json"
    held = [load_file(tmp_path / "trained" / shard) for shard in shards]
    sizes = [[tensor.nbytes for tensor in each.values()] for each in held]
    assert all(sum(each) <= SMALL or len(each) == 1 for each in sizes)
    assert any(len(each) > 1 for each in sizes)
    told = json.loads((tmp_path / "trained" / index).read_text())
    assert told["metadata"]["total_size"] == sum(map(sum, sizes))
    assert told["weight_map"] == {
        name: shard for shard, each in zip(shards, held, strict=True) for name in each
    }


def test_what_was_there_is_replaced_and_other_files_stay(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    folder = tmp_path / "trained"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for k, size in enumerate((SMALL, 5_000, SMALL // 2, SMALL)):
        with torch.no_grad():
            pipe.first.bias.fill_(k)
        pipe.save_weights(folder, size)
        found = loaded(folder)
        assert same(found, pipe.state_dict())
        assert len(found) == len(model.state_dict())
        files = set(names(folder)) - {"config.json", "model.safetensors.index.json"}
        index = folder / "model.safetensors.index.json"
        told = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        assert files == set(told.values()) or files == {"model.safetensors"}
    assert (folder / "config.json").read_text() == "{}"


def test_what_was_saved_last_is_loaded_though_shards_of_before_stand_beside_it(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    pipe.save_weights(tmp_path / "trained", SMALL)
    shards = names(tmp_path / "trained")
    with torch.no_grad():
        pipe.first.bias.zero_()
    pipe.save_weights(tmp_path / "trained" / "model.safetensors")
    assert names(tmp_path / "trained") == sorted([*shards, "model.safetensors"])
    pipe.load_state_dict(model.state_dict())
    pipe.load_weights(tmp_path / "trained")
    assert not pipe.first.bias.any()
    pipe.load_weights(tmp_path / "trained" / "model.safetensors.index.json")
    assert same(pipe.state_dict(), model.state_dict())
    pipe.save_weights(tmp_path / "trained", SMALL)
    assert names(tmp_path / "trained") == shards


@pytest.mark.parametrize("path", ["trained", "trained/model.safetensors"])
def test_one_that_fails_leaves_what_was_there(tmp_path, monkeypatch, path):
    model, pipe = both(tmp_path, CHAIN)
    pipe.save_weights(tmp_path / path, SMALL)
    before = names(tmp_path / "trained")
    with torch.no_grad():
        pipe.first.bias.zero_()
    written = []

    def full(content):
        written.append(content)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return bytes_of(content)

    with monkeypatch.context() as patch:
        patch.setattr("fxpipe.runtime.weights.saving.bytes_of", full)
        with pytest.raises(WeightsError, match=r"can't be written: .*No space left"):
            pipe.save_weights(tmp_path / path, SMALL)
    assert names(tmp_path / "trained") == before
    pipe.load_weights(tmp_path / "trained")
    assert same(pipe.state_dict(), model.state_dict())


def test_old_and_new_are_never_taken_for_one(tmp_path, monkeypatch):
    """Wherever it ends while files come to their places."""
    _, pipe = both(tmp_path, CHAIN)
    folder = tmp_path / "trained"
    replace, left = Path.replace, []

    def dies(self, target):
        if not left:
            raise OSError("killed")
        left.pop()
        return replace(self, target)

    pipe.save_weights(folder, SMALL)
    n = len(names(folder))
    ends = []
    for moved in range(n):
        with torch.no_grad():
            pipe.first.bias.fill_(moved)
        left[:] = range(moved)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", dies)
            with pytest.raises(WeightsError, match="killed"):
                pipe.save_weights(folder, SMALL)
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        try:
            pipe.load_weights(folder)
            ends.append(same(pipe.state_dict(), state))
        except WeightsError:
            ends.append(None)
    assert ends == [None] * (n - 1) + [True]  # at last the index alone was not there yet


def test_what_a_process_that_died_has_left_is_no_weights_and_goes_with_the_next(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    folder = tmp_path / "trained"
    left = folder / ".trained.writing"
    left.mkdir(parents=True)
    (left / "model-00001-of-00002.safetensors").write_bytes(b"half")
    with pytest.raises(WeightsError, match=r"has no \.safetensors files"):
        pipe.load_weights(folder)
    pipe.save_weights(folder)
    assert names(folder) == ["model.safetensors"]
    assert same(loaded(folder), model.state_dict())


@pytest.mark.parametrize("size", [0, "much", "0GB"])
def test_a_shard_size_that_is_none_is_refused(tmp_path, size):
    _, pipe = both(tmp_path, CHAIN)
    with pytest.raises(InputError, match=re.escape(str(size))):
        pipe.save_weights(tmp_path / "trained", size)


def test_each_dtype_comes_back_bit_by_bit(tmp_path):
    """Odd sizes among them: each tensor lies where its dtype may."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2, (48,), dtype=torch.uint8, generator=generator)
    tensors = {str(dtype): raw.clone().view(dtype)[:3] for dtype in tensor_file._DTYPES}
    tensors |= {
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "strided": torch.arange(12)[::2],
        "conjugate": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj(),
    }
    entries = entries_of(tensors)
    path = tmp_path / "all.safetensors"
    write(path, entries, (bytes_of(tensors[e.name]) for e in entries), {"format": "pt"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bytes_of(found[name]), bytes_of(tensor)), name
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    for entry in entries:
        assert header[entry.name]["data_offsets"][0] % entry.dtype.itemsize == 0


def test_a_dtype_that_the_format_does_not_know_is_refused(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    pipe.first.bias.data = pipe.first.bias.data.to(torch.complex128)
    with pytest.raises(WeightsError, match=r"first\.bias, which is torch\.complex128"):
        pipe.save_weights(tmp_path / "trained")
    assert not (tmp_path / "trained").exists()
