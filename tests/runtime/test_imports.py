"""A pipeline is pickled by its package: its stages' classes are found again, or it says why not."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from toys import CHAIN, TIED, assert_same_state, both, mean_loss, plain_step, same

from fxpipe.runtime import load

READS = """
import pickle, sys
from fxpipe.errors import PackageError

for _ in range(2):
    try:
        with open(sys.argv[1], "rb") as file:
            pipe, x = pickle.load(file)
        print(repr(pipe(*x).sum().item()))
    except PackageError as error:
        print(error)
"""


def _elsewhere(file):
    """What another process prints that reads the file twice."""
    command = [sys.executable, "-c", READS, file]
    return subprocess.check_output(command, text=True).splitlines()


def _saved(pipe):
    file = io.BytesIO()
    torch.save(pipe, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _edit(folder):
    file = folder / "stage_2.py"
    file.write_text(file.read_text().replace("return ", "return 2 * "))


COPIES = {
    "pickled": lambda pipe: pickle.loads(pickle.dumps(pipe)),
    "saved": _saved,
    "copied": copy.deepcopy,
}


@pytest.mark.parametrize("again", COPIES)
@pytest.mark.parametrize("edited", [False, True])
def test_a_pipeline_is_copied_after_its_package_was_loaded_again(tmp_path, again, edited):
    model, pipe = both(tmp_path, TIED)
    x = TIED.inputs()
    expected = plain_step(TIED, model, x, 4)
    pipe.step(*x, loss_fn=mean_loss)
    if edited:
        _edit(tmp_path)
    load(tmp_path)
    for other in (COPIES[again](pipe), COPIES[again](COPIES[again](pipe))):
        other.zero_grad()
        assert same(other.step(*x, loss_fn=mean_loss), expected)
        assert_same_state(other, model)


def test_a_copy_needs_no_files(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    for file in tmp_path.iterdir():
        file.unlink()
    for make in COPIES.values():
        assert same(make(pipe)(*CHAIN.inputs()), pipe(*CHAIN.inputs()))


def test_another_process_reads_a_pickled_pipeline_while_its_package_is_as_it_was(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    _, pipe = both(folder, CHAIN)
    x, file = CHAIN.inputs(), tmp_path / "pipe.pkl"
    file.write_bytes(pickle.dumps((pipe, x)))
    assert [*map(float, _elsewhere(file))] == [pipe(*x).sum().item()] * 2
    moved = folder.rename(tmp_path / "moved")
    for line in _elsewhere(file):
        assert f"the stages of the package in {folder}, which is not there any more" in line
    moved.rename(folder)
    _edit(folder)
    assert all("or has other code since: put it back" in line for line in _elsewhere(file))
