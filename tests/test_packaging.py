"""The built wheel holds what an installed fxpipe needs, under `fxpipe` alone, and runs the demo."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("fxpipe", "passes", "codegen", "pyproject.toml", "README.md")


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools would take up what an earlier build left."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out)
    run("-m", "pip", "wheel", "--quiet", *options, tree, cwd=out)
    (found,) = out.glob("fxpipe-*.whl")
    return found


def test_wheel_has_one_top_level_package_and_every_source(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fxpipe"}
    for folder, prefix in (("fxpipe", ""), ("passes", "fxpipe/"), ("codegen", "fxpipe/")):
        for pattern in ("*.py", "*.j2", "*.js", "py.typed"):
            for path in (ROOT / folder).rglob(pattern):
                assert prefix + path.relative_to(ROOT).as_posix() in names
    assert any(name.endswith(".j2") for name in names)


def test_wheel_runs_the_demo_away_from_the_checkout(wheel, tmp_path):
    site, out = tmp_path / "site", tmp_path / "unet"
    options = ("--quiet", "--no-deps", "--no-index", "--target", site)
    run("-m", "pip", "install", *options, wheel, cwd=tmp_path)
    shutil.copy(ROOT / "examples/unet.py", tmp_path / "unet.py")
    code = "import fxpipe.passes, fxpipe.codegen; print(fxpipe.passes.__file__, fxpipe.__file__)"
    for file in run("-c", code, cwd=tmp_path, PYTHONPATH=str(site)).split():
        assert Path(file).is_relative_to(site)
    command = ("-m", "fxpipe", "compile", "unet.py", "--devices", 2, "-o", out)
    table = run(*command, cwd=tmp_path, PYTHONPATH=str(site))
    assert "predicted step" in table
    # The package moves to where the model's file is not.
    away = tmp_path / "away"
    away.mkdir()
    out.rename(away / "moved")
    code = "import moved, torch; print(*moved.load()(torch.randn(4, 3, 64, 64)).shape)"
    assert run("-c", code, cwd=away, PYTHONPATH=str(site)) == "4 1 64 64\n"
