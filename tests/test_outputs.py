"""What is written stands at its place whole, or not at all."""

import os
from pathlib import Path

import pytest

from fxpipe.errors import InputError
from fxpipe.outputs import whole_file


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
    ):
        refused = pytest.raises(InputError, match=f"{path} can't be written: .*{why}")
        with refused, whole_file(path):
            raise AssertionError
