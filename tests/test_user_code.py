"""The user's files find their neighbours, and what they raise is told with the line."""

import sys
from pathlib import Path

import pytest

from fxpipe.errors import TargetError
from fxpipe.user_code import import_file, import_module, running


def use(name: str) -> object:
    """Import the file, and call its `run`."""
    module = import_file(name, str(Path.cwd()))
    with running("run()", str(Path.cwd())):
        return module.run()


def message(name: str) -> str:
    with pytest.raises(TargetError) as caught:
        use(name)
    return str(caught.value)


def test_neighbours_can_be_imported_late_and_the_path_is_restored(write):
    write("WIDTH = 5", "toy_widths.py")
    name = write("def run():\n    import toy_widths\n    return toy_widths.WIDTH")
    before = list(sys.path)
    assert use(name) == 5
    assert sys.path == before


def test_a_file_of_a_package_is_named_as_a_module(write):
    write("", "toy_parts/__init__.py")
    write("WIDTH = 4", "toy_parts/widths.py")
    told = message(write("from .widths import WIDTH", "toy_parts/model.py"))
    assert "relative import" in told
    assert f"from the folder {Path.cwd()}, give toy_parts.model or toy_parts.model:factory" in told
    assert import_module("toy_parts.model", str(Path.cwd())).WIDTH == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\nraise ValueError('no luck')", "ValueError: no luck\n  toy_model.py, line 2: raise"),
        ("\nx = = 3", "SyntaxError: invalid syntax\n  toy_model.py, line 2: x = = 3"),
        ("import nothing_like_it", "No module named 'nothing_like_it'\n  toy_model.py, line 1"),
        (
            "from torch import nn\ndef run():\n    nn.Linear(4, 'b')",
            "run() raised TypeError: empty()",
        ),
        ("from torch import nn\ndef run():\n    nn.Linear(4, 'b')", "toy_model.py, line 3: nn.Lin"),
        ("def run():\n    exit('stop')", "run() raised SystemExit: stop\n  toy_model.py, line 2"),
    ],
)
def test_what_is_raised_is_told_with_the_last_line_of_the_users(write, text, says):
    assert says in message(write(text))


def test_what_no_line_of_the_users_has_part_in_is_raised_as_it_is(write):
    with pytest.raises(ValueError, match="ours"), running("run()", str(Path.cwd())):
        raise ValueError("ours")


def test_where_the_users_code_runs_alone_a_librarys_exception_is_its_own(write):
    told = pytest.raises(TargetError, match=r"run\(\) raised ValueError: a library's$")
    with told, running("run()", str(Path.cwd()), alone=True):
        raise ValueError("a library's")


def test_the_frames_of_torch_are_no_part_of_a_message(write):
    told = message(write("import torch\ndef run():\n    torch.randn(10**20)"))
    assert "toy_model.py, line 3: torch.randn(10**20)" in told
    assert len(told.splitlines()) < 5
