"""torchgpipe's own test-suite, run against `fxpipe.compat`.

git clone --branch v0.0.7 https://github.com/kakaobrain/torchgpipe
python benchmarks/torchgpipe_tests.py torchgpipe            the tests that apply
python benchmarks/torchgpipe_tests.py torchgpipe -k skip    options of pytest follow

Their tests are copied beside a stand-in package named `torchgpipe`, whose modules are those of
`fxpipe.compat`. Tests of torchgpipe's internals are left out by name: docs/compat.md says why.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Left out as a whole: each is of a module that users do not import.
INTERNAL_FILES = (
    "test_checkpoint.py",
    "test_copy.py",
    "test_dependency.py",
    "test_microbatch.py",
    "test_phony.py",
    "test_pipeline.py",
    "test_stream.py",
    "test_worker.py",
    "skip/test_inspect_skip_layout.py",
    "skip/test_portal.py",
    "skip/test_tracker.py",
)
INTERNAL_TESTS = (
    "test_balance.py::test_deprecated_torchgpipe_balancing",
    "skip/test_leak.py::test_delete_portal_tensor",
)
# Writes into a view of a leaf, which PyTorch refuses since 1.5: fails with torchgpipe itself too.
OUTDATED_TESTS = ("test_deferred_batch_norm.py::test_input_requiring_grad",)

# `torchgpipe.x` is `fxpipe.compat.x`. Two test files import names of internals at their top that
# are not what they test: `torchgpipe.skip.portal` has stand-ins for them.
PACKAGE = '''
import importlib
import sys
import types

from fxpipe.compat import *
from fxpipe.runtime import copy

import torchgpipe

for name in (
    "balance", "balance.blockpartition", "balance.profile", "batchnorm", "checkpoint", "gpipe",
    "skip", "skip.namespace", "skip.skippable", "skip.tracker",
):
    module = importlib.import_module(f"fxpipe.compat.{name}")
    sys.modules[f"torchgpipe.{name}"] = module
    if "." not in name:
        setattr(torchgpipe, name, module)


class Portal:
    """What nothing may make; skips are sent by `fxpipe.runtime.copy`."""


portal = types.ModuleType("torchgpipe.skip.portal")
portal.Portal = Portal
portal.PortalBlue = portal.PortalOrange = copy.Wait
portal.PortalCopy = copy.Copy
sys.modules[portal.__name__] = portal
torchgpipe.skip.portal = portal
'''

# `pytest.warns(None)`, which two tests use to see that nothing warns, left pytest with version 8.
PLUGIN = """
import warnings

import pytest

_warns = pytest.warns


def warns(expected=Warning, *args, **kwargs):
    if expected is None:
        return warnings.catch_warnings(record=True)
    return _warns(expected, *args, **kwargs)


pytest.warns = warns
"""


def run(clone: Path, options: list[str]) -> int:
    """Copy the tests, run them, and give pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(clone / "tests", root / "tests")
        (root / "torchgpipe").mkdir()
        (root / "torchgpipe/__init__.py").write_text(PACKAGE)
        (root / "warns_none.py").write_text(PLUGIN)
        left_out = [f"--ignore=tests/{file}" for file in INTERNAL_FILES]
        left_out += [f"--deselect=tests/{test}" for test in INTERNAL_TESTS + OUTDATED_TESTS]
        command = [sys.executable, "-m", "pytest", "-p", "warns_none", "tests", *left_out]
        return subprocess.run([*command, *options], cwd=root).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clone", type=Path, help="folder of a clone of torchgpipe 0.0.7")
    known, rest = parser.parse_known_args()
    raise SystemExit(run(known.clone, rest))
