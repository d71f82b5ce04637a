"""A checkpoint in one process: what is loaded goes on as what was saved would have."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toys
from torch import nn

import fxpipe
from fxpipe.errors import WeightsError
from fxpipe.outputs import standing
from fxpipe.runtime import load

DYING = Path(__file__).with_name("dying.py")


def trained(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer) -> None:
    (x,) = toys.CHAIN.inputs()
    for _ in range(steps):
        optimizer.zero_grad()
        toys.mean_loss(model(x)).backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    last = [p for name, p in model.named_parameters() if "last" in name]
    others = [p for name, p in model.named_parameters() if "last" not in name]
    return torch.optim.AdamW([{"params": others, "lr": 0.05}, {"params": last}], 0.01)


def test_it_goes_on_as_if_it_had_not_stopped(tmp_path):
    model, pipe = toys.both(tmp_path, toys.CHAIN)
    plain, optimizer = adam(model), adam(pipe)
    trained(model, 3, plain)
    trained(pipe, 2, optimizer)
    fxpipe.checkpoint.save(tmp_path / "last", pipe, optimizer, {"step": 2})
    again = load(tmp_path)
    resumed = torch.optim.AdamW([{"params": g["params"]} for g in adam(again).param_groups], 1.0)
    assert fxpipe.checkpoint.load(tmp_path / "last", again, resumed) == {"step": 2}
    assert [group["lr"] for group in resumed.param_groups] == [0.05, 0.01]
    trained(again, 1, resumed)
    values = dict(model.named_parameters())
    assert all(toys.same(p, values[name]) for name, p in again.named_parameters())


def test_the_plain_model_loads_a_pipelines_and_the_other_way_round(tmp_path):
    model, pipe = toys.both(tmp_path, toys.TIED, devices=(0, 1, 1))
    fxpipe.checkpoint.save(tmp_path / "one", pipe)
    other = toys.TIED.model().double()
    fxpipe.checkpoint.load(tmp_path / "one", other)
    assert all(
        torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True)
    )
    with torch.no_grad():
        other.mid.bias.add_(1.0)
    fxpipe.checkpoint.save(tmp_path / "two", other)
    fxpipe.checkpoint.load(tmp_path / "two", pipe)
    assert torch.equal(pipe.state_dict()["mid.bias"], other.mid.bias)


def test_what_modules_add_to_their_state_goes_along(tmp_path):
    class Counts(toys.CHAIN.model):
        steps = 3

        def get_extra_state(self):
            return {"steps": self.steps}

        def set_extra_state(self, state):
            self.steps = state["steps"]

    _, pipe = toys.both(tmp_path, toys.CHAIN)
    fxpipe.checkpoint.save(tmp_path / "without", pipe)
    pipe.load_state_dict(Counts().double().state_dict())
    fxpipe.checkpoint.save(tmp_path / "with", pipe)
    again, model = load(tmp_path), Counts().double()
    fxpipe.checkpoint.load(tmp_path / "with", again)
    assert again.state_dict()["_extra_state"] == {"steps": 3}
    model.steps = 5
    fxpipe.checkpoint.load(tmp_path / "without", model)
    assert model.steps == 5
    fxpipe.checkpoint.load(tmp_path / "with", model)
    assert model.steps == 3


def test_the_one_before_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    path = tmp_path / "last"
    assert not fxpipe.checkpoint.exists(path)
    fxpipe.checkpoint.save(path, pipe, extra=1)

    def dies(*_: object, **__: object) -> None:
        raise RuntimeError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.FileSystemWriter.finish", dies)
        with pytest.raises(WeightsError, match="no space left"):
            fxpipe.checkpoint.save(path, pipe, extra=2)
    assert fxpipe.checkpoint.load(path, pipe) == 1
    fxpipe.checkpoint.save(path, pipe, extra=3)
    assert fxpipe.checkpoint.load(path, pipe) == 3
    # As if the process had died between the old one's going and the new one's coming.
    path.rename(tmp_path / ".last.before")
    assert fxpipe.checkpoint.exists(path)
    assert fxpipe.checkpoint.load(path, pipe) == 3
    fxpipe.checkpoint.save(path, pipe, extra=4)
    assert fxpipe.checkpoint.load(path, pipe) == 4
    assert not [child for child in tmp_path.iterdir() if child.name.startswith(".last")]


def test_whenever_a_process_is_killed_one_version_is_there_whole(tmp_path):
    toys.write(tmp_path, toys.CHAIN)
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, str(DYING), str(tmp_path), str(tmp_path / "run" / "last")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    moments = done.stdout.splitlines()
    for touched in (
        "open .last.writing/__0_0.distcp",
        "os.rename .last.writing/.metadata.tmp",
        "os.rename last",
        "os.rename .last.writing",
        "os.rmdir .last.before",
    ):
        assert f"killed at {touched}" in moments
    assert moments.count("saved") == 2


def test_a_link_is_followed_and_a_folder_made_anew_hides_nothing(tmp_path):
    model = nn.Linear(2, 2)
    (tmp_path / "disk").mkdir()
    (tmp_path / "last").symlink_to("disk")
    for k in range(3):
        fxpipe.checkpoint.save(tmp_path / "last", model, extra=k)
        assert fxpipe.checkpoint.load(tmp_path / "disk", model) == k
    # As if the process had died then, and its script had made the folder again.
    (tmp_path / "disk").rename(tmp_path / ".disk.before")
    (tmp_path / "disk").mkdir()
    assert fxpipe.checkpoint.load(tmp_path / "last", model) == 2


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    for path in (tmp_path, tmp_path / "plan.json"):
        with pytest.raises(WeightsError, match="no whole checkpoint: move it, or save elsewhere"):
            fxpipe.checkpoint.save(path, pipe)
    assert (tmp_path / "plan.json").is_file()
    with pytest.raises(WeightsError, match="no whole checkpoint: move it, or save elsewhere"):
        fxpipe.checkpoint.save("/", pipe)
    (tmp_path / "empty").mkdir()
    fxpipe.checkpoint.save(tmp_path / "empty", pipe)
    assert fxpipe.checkpoint.exists(tmp_path / "empty")


@pytest.mark.parametrize("killed", [False, True])
def test_other_files_in_its_folder_are_named_and_not_lost(tmp_path, killed):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    path = tmp_path / "last"
    fxpipe.checkpoint.save(path, pipe, extra=1)
    fxpipe.checkpoint.save(path / "best", pipe)
    (path / "notes.txt").write_text("mine")
    if killed:  # between the old one's going and the new one's coming
        path.rename(tmp_path / ".last.before")
    with pytest.raises(WeightsError, match=r"holds best, notes\.txt, which would be lost: move"):
        fxpipe.checkpoint.save(path, pipe, extra=2)
    folder = standing(path)
    assert (folder / "notes.txt").read_text() == "mine"
    assert fxpipe.checkpoint.exists(folder / "best")
    assert fxpipe.checkpoint.load(path, pipe) == 1


def test_what_more_ranks_wrote_is_the_checkpoints_own_and_goes(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    path = tmp_path / "last"
    fxpipe.checkpoint.save(path, pipe)
    for name in ("__0_1.distcp", "__12_0.distcp"):
        (path / name).write_bytes(b"")
    fxpipe.checkpoint.save(path, pipe)
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp"]


def test_what_is_not_whole_or_does_not_fit_loads_nothing(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    path = tmp_path / "last"
    with pytest.raises(WeightsError, match="is no whole checkpoint"):
        fxpipe.checkpoint.load(path, pipe)
    fxpipe.checkpoint.save(path, pipe)
    shutil.copytree(path, tmp_path / "half")
    assert fxpipe.checkpoint.exists(tmp_path / "half")
    (tmp_path / "half" / ".metadata").unlink()
    assert not fxpipe.checkpoint.exists(tmp_path / "half")
    with pytest.raises(WeightsError, match="is no whole checkpoint"):
        fxpipe.checkpoint.load(tmp_path / "half", pipe)
    with pytest.raises(WeightsError, match=r"first\.weight: expected"):
        fxpipe.checkpoint.load(path, nn.ModuleDict({"first": nn.Linear(3, 7)}))


@pytest.mark.parametrize("name", ["x" * 300, "loop/last", "loop"])
def test_a_place_that_can_hold_no_checkpoint_is_told(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    path = tmp_path / name
    assert not fxpipe.checkpoint.exists(path)
    with pytest.raises(WeightsError, match="can't be written: "):
        fxpipe.checkpoint.save(path, pipe)
    with pytest.raises(WeightsError, match="is no whole checkpoint"):
        fxpipe.checkpoint.load(path, pipe)


def halved(content: bytes) -> bytes:
    return content[: len(content) // 2]


HARM = {
    ".metadata cut off": (".metadata", halved, r"\.metadata is damaged \(UnpicklingError"),
    ".metadata empty": (".metadata", lambda _: b"", r"\.metadata is damaged \(EOFError"),
    ".metadata of zeros": (".metadata", lambda c: bytes(len(c)), r"\.metadata is damaged"),
    ".metadata of another": (".metadata", lambda _: pickle.dumps({}), r"\.metadata is damaged"),
    "data cut off": ("__0_0.distcp", halved, r"__0_0\.distcp is cut off: it has \d+ bytes of \d+"),
    "data gone": ("__0_0.distcp", None, r"__0_0\.distcp can't be read \(No such file"),
}


@pytest.mark.parametrize("case", HARM)
def test_a_damaged_file_is_told_before_anything_is_loaded_and_is_not_replaced(tmp_path, case):
    name, harm, says = HARM[case]
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    path = tmp_path / "last"
    fxpipe.checkpoint.save(path, pipe)
    for parameter in pipe.parameters():
        parameter.data.zero_()
    if harm is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(harm((path / name).read_bytes()))
    assert not fxpipe.checkpoint.exists(path)
    with pytest.raises(WeightsError, match=f"is no whole checkpoint: {says}") as error:
        fxpipe.checkpoint.load(path, pipe)
    assert "Traceback" not in str(error.value)
    assert "or load another" in str(error.value)
    assert not any(parameter.any() for parameter in pipe.parameters())
    with pytest.raises(WeightsError, match="no whole checkpoint: move it, or save elsewhere"):
        fxpipe.checkpoint.save(path, pipe)


def test_what_only_reading_shows_to_be_damaged_is_told_in_a_line(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    fxpipe.checkpoint.save(tmp_path / "last", pipe)
    (file,) = (tmp_path / "last").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:600] + bytes(file.stat().st_size - 600))
    with pytest.raises(WeightsError, match="may be its own now: ") as error:
        fxpipe.checkpoint.load(tmp_path / "last", pipe)
    assert "Traceback" not in str(error.value)
