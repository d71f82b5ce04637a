"""What is written stands at its place whole, or not at all."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from fxpipe.errors import InputError
from fxpipe.outputs import filled_for, standing, whole_file, whole_folder


def test_a_file_comes_to_its_place_once_it_is_whole_and_folders_are_made(tmp_path):
    path = tmp_path / "new" / "step.svg"
    with whole_file(path) as file:
        assert file.suffix == ".svg"
        file.write_text("drawn")
        assert not path.exists()
    assert path.read_text() == "drawn"
    assert os.listdir(path.parent) == ["step.svg"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt])
def test_what_stood_there_stays_if_the_new_file_does_not_get_whole(error, tmp_path):
    def write_half():
        with whole_file(tmp_path / "costs.json") as file:
            file.write_text("half")
            raise error

    (tmp_path / "costs.json").write_text("before")
    with pytest.raises((InputError, KeyboardInterrupt)):
        write_half()
    assert (tmp_path / "costs.json").read_text() == "before"
    assert os.listdir(tmp_path) == ["costs.json"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link.json").symlink_to("costs.json")
    with whole_file(tmp_path / "link.json") as file:
        file.write_text("new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "costs.json").read_text() == "new"


def test_a_device_is_written_to():
    with whole_file(Path(os.devnull)) as file:
        file.write_text("gone")
    assert Path(os.devnull).is_char_device()


def test_a_place_that_can_hold_no_file_is_refused(tmp_path):
    (tmp_path / "afile").touch()
    for path, why in (
        (tmp_path, "it is a folder: name a file in it"),
        (tmp_path / "afile" / "sub" / "costs.json", "afile is no folder"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        refused = pytest.raises(InputError, match=f"{path} can't be written: .*{why}")
        with refused, whole_file(path):
            raise AssertionError


def fill(path: Path, text: str, error: BaseException | None = None) -> None:
    with whole_folder(path) as folder:
        (folder / "text").write_text(text)
        if error is not None:
            raise error


def test_a_folder_comes_to_its_place_once_it_is_whole(tmp_path):
    path = tmp_path / "new" / "out"
    with whole_folder(path) as folder:
        assert folder == filled_for(path)
        (folder / "text").write_text("one")
        assert not path.exists()
    fill(path, "two")
    assert (path / "text").read_text() == "two"
    assert os.listdir(path.parent) == ["out"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_the_folder_that_stood_there_stays_if_the_new_one_does_not_get_whole(error, tmp_path):
    path = tmp_path / "out"
    fill(path, "before")
    with pytest.raises(type(error)):
        fill(path, "half", error)
    assert (path / "text").read_text() == "before"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_the_old_folder_is_back_if_the_new_one_does_not_come_to_its_place(
    error, tmp_path, monkeypatch
):
    rename, away = Path.rename, []

    def fails_once_the_old_one_is_away(source: Path, target: Path) -> None:
        if away:
            raise away.pop()
        away.append(error)
        rename(source, target)

    path = tmp_path / "out"
    fill(path, "before")
    monkeypatch.setattr(Path, "rename", fails_once_the_old_one_is_away)
    with pytest.raises(type(error)):
        fill(path, "new")
    assert (path / "text").read_text() == "before"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("made_anew", [False, True])
def test_what_a_killed_process_left_beside_is_found_and_put_back(made_anew, tmp_path):
    path = tmp_path / "out"
    fill(path, "before")
    filled_for(path).mkdir()
    path.rename(tmp_path / ".out.before")  # and there it was killed
    if made_anew:
        path.mkdir()  # as a training script does first
    assert (standing(path) / "text").read_text() == "before"
    with pytest.raises(OSError, match="full"):
        fill(path, "half", OSError("disk full"))
    assert standing(path) == path
    assert (path / "text").read_text() == "before"
    assert os.listdir(tmp_path) == ["out"]


def test_the_old_folder_is_removed_if_a_process_was_killed_before_it_did(tmp_path):
    path = tmp_path / "out"
    fill(path, "new")
    fill(tmp_path / ".out.before", "old")
    assert standing(path) == path
    fill(path, "newer")
    assert (path / "text").read_text() == "newer"
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_to_a_folder_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    path = tmp_path / "last"
    path.symlink_to("disk")
    for text in ("one", "two"):
        fill(path, text)
        assert (path / "text").read_text() == text
    assert path.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["disk", "last"]


def test_a_folder_that_another_process_fills_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "out"
    with whole_folder(path) as folder:
        (folder / "text").write_text("one")
        with pytest.raises(OSError, match="another process is writing it"):
            fill(path, "two")
    assert (path / "text").read_text() == "one"
    assert os.listdir(tmp_path) == ["out"]


def test_other_folders_beside_it_are_filled_meanwhile(tmp_path):
    with whole_folder(tmp_path / "out"):
        fill(tmp_path / "other", "two")
    assert sorted(os.listdir(tmp_path)) == ["other", "out"]


def test_of_those_that_fill_one_folder_at_once_each_puts_it_there_whole_or_is_told(tmp_path):
    path = tmp_path / "out"

    def fill_often(name: str) -> None:
        for k in range(200):
            # A lock is of the folder as it was opened: threads keep each other out as well.
            with suppress(BlockingIOError), whole_folder(path) as folder:
                for file in "0123":
                    (folder / file).write_text(f"{name}{k}")

    with ThreadPoolExecutor() as threads:
        list(threads.map(fill_often, "abc"))
    assert len({(path / file).read_text() for file in "0123"}) == 1
    assert os.listdir(tmp_path) == ["out"]
