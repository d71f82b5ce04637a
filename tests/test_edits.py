"""What a hand changed in a package is told, and nothing of it is lost by compiling again."""

import json

import models
import pytest
import torch
from flat import compile_flat

from fxpipe.edits import Edits, edits
from fxpipe.errors import PackageError


def compiled(devices="cpu*2"):
    return compile_flat(models.Norms(), (torch.ones(4, 3, 8, 8),), devices=devices, microbatches=2)


@pytest.fixture(scope="module")
def norms():
    return compiled()


@pytest.fixture
def out(norms, tmp_path):
    """A package with all that one can hold."""
    return norms.write(tmp_path / "out", weights=True, standalone=True)


def append(path, text="# mine\n"):
    path.write_text(path.read_text() + text)


def change_plan(out):
    plan = json.loads((out / "plan.json").read_text())
    plan["stages"][0]["checkpoint"] = "always"
    (out / "plan.json").write_text(json.dumps(plan))


def overwrite_weights(out):
    from safetensors.torch import load_file, save_file

    file = out / "weights/stage_0.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)


EDITED = {
    "stage_0.py": lambda out: append(out / "stage_0.py"),
    "__init__.py": lambda out: append(out / "__init__.py"),
    "_fxpipe/runtime/step.py": lambda out: append(out / "_fxpipe/runtime/step.py"),
    "schedule.csv": lambda out: append(out / "schedule.csv", "\n"),
    "plan.json": change_plan,
    "weights/stage_0.safetensors": overwrite_weights,
}


def test_what_was_written_is_unedited_and_replaced_whole(norms, out):
    assert edits(out) == Edits()
    (out / "__pycache__").mkdir()
    (out / "__pycache__/stage_0.pyc").write_bytes(b"")
    plan = json.loads((out / "plan.json").read_text())
    (out / "plan.json").write_text(json.dumps(plan, indent=4))  # says the same
    assert edits(out) == Edits()
    compiled("cpu*1").write(out)
    names = {path.name for path in out.iterdir()}
    assert names == {"__init__.py", "stage_0.py", "schedule.csv", "plan.json"}


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_file_is_named_and_never_overwritten(norms, out, name):
    EDITED[name](out)
    assert edits(out) == Edits(edited=(name,))
    kept = (out / name).read_bytes()
    with pytest.raises(PackageError, match=f"edited by hand: {name}"):
        norms.write(out)
    assert (out / name).read_bytes() == kept
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_what_another_version_wrote_is_replaced_if_unedited(norms, out):
    plan = json.loads((out / "plan.json").read_text())
    plan["format"] -= 1
    del plan["estimate"], plan["files"]["plan.json"]
    (out / "plan.json").write_text(json.dumps(plan))
    norms.write(out)
    assert edits(out) == Edits()
    (out / "plan.json").write_text("{}")
    with pytest.raises(PackageError, match=r"plan.json does not say which files are fxpipe's"):
        norms.write(out)


@pytest.mark.parametrize("files", [{}, {"a.txt": "1"}])
def test_another_tools_plan_is_none_of_ours(norms, tmp_path, files):
    text = json.dumps({"files": files, "format": "1.2", "steps": ["mine"]})
    (tmp_path / "plan.json").write_text(text)
    for look in (edits, norms.write):
        with pytest.raises(PackageError, match=r"plan.json does not say which files are fxpipe's"):
            look(tmp_path)
    assert (tmp_path / "plan.json").read_text() == text


def test_an_edited_file_that_was_moved_away_is_in_nobodys_way(norms, out):
    append(out / "stage_0.py")
    (out / "stage_0.py").rename(out.parent / "mine.py")
    assert edits(out) == Edits(missing=("stage_0.py",))
    norms.write(out)
    assert edits(out) == Edits()


@pytest.mark.parametrize("name", ["notes.md", "weights/trained.safetensors", ".git/HEAD"])
def test_an_added_file_is_named_and_never_lost(norms, out, name):
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    assert edits(out) == Edits(added=(name,))
    with pytest.raises(PackageError, match=f"{name}, which would be lost"):
        norms.write(out)
    assert (out / name).read_text() == "mine"


def test_a_package_from_before_its_plan_was_hashed(norms, out):
    plan = json.loads((out / "plan.json").read_text())
    del plan["files"]["plan.json"]
    (out / "plan.json").write_text(json.dumps(plan))
    assert edits(out) == Edits()


def test_the_current_folder_is_not_replaced(norms, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PackageError, match="is the current folder, which would be replaced"):
        norms.write(".")


def test_a_file_that_cannot_be_read_is_told_and_never_lost(norms, out):
    (out / "stage_0.py").unlink()
    (out / "stage_0.py").symlink_to("nowhere.py")
    for look in (edits, norms.write):
        with pytest.raises(PackageError, match=r"stage_0\.py can't be read \(No such file"):
            look(out)
    assert (out / "stage_0.py").is_symlink()


def test_a_place_that_no_package_can_have_is_refused(norms, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for path, why in (
        ("/", "exists and is no fxpipe package"),
        (tmp_path / ("x" * 300), "can't be written: File name too long"),
        (tmp_path / ("x" * 250), "can't be written: File name too long"),
        (tmp_path / "loop", "is a link to loop"),
        (tmp_path / "loop" / "out", "loop is no folder"),
    ):
        with pytest.raises(PackageError, match=why):
            norms.write(path)


def test_a_folder_that_is_no_package(tmp_path):
    with pytest.raises(PackageError, match="no package of fxpipe"):
        edits(tmp_path)
