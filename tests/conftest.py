"""One switch makes the goldens anew: `pytest --update-goldens`; then read the diff."""

import os
from pathlib import Path

import pytest
import torch

# Ranks ask the name server for each other's addresses, to log them (pytorch#159007). One that
# doesn't answer holds each up for ten seconds; many ranks start at once here.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_addoption(parser):
    parser.addoption(
        "--update-goldens", action="store_true", help="write goldens instead of comparing"
    )


@pytest.fixture
def update_goldens(request):
    return request.config.getoption("--update-goldens")


@pytest.fixture(autouse=True)
def _two_threads():
    """Small models: more threads only wait for each other."""
    torch.set_num_threads(2)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _cuda_or_skip(request):
    if request.node.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a user's file into a folder of its own, which is the current one; gives its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "toy_model.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write
