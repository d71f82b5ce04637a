"""Imports point one way, and heavy libraries load only where they are used."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"fxpipe": ROOT / "fxpipe", "passes": ROOT / "passes", "codegen": ROOT / "codegen"}

# What a module may import of fxpipe; a name stands for everything below it too. A module not
# listed stands at the top, with the command, and may import all.
BASE = (
    "fxpipe.errors",
    "fxpipe.schedule",
    "fxpipe.schedule_check",
    "fxpipe.runtime",
    "fxpipe.ir",
)
HELPERS = (
    "fxpipe.difference",
    "fxpipe.jit",
    "fxpipe.memory",
    "fxpipe.outputs",
    "fxpipe.precision",
    "fxpipe.quiet",
    "fxpipe.turned",
)
RULES = {
    "fxpipe.errors": (),
    "fxpipe.schedule": ("fxpipe.errors",),
    "fxpipe.schedule_check": ("fxpipe.errors", "fxpipe.schedule"),
    "fxpipe.runtime": (
        "fxpipe.errors",
        "fxpipe.schedule",
        "fxpipe.schedule_check",
        "fxpipe.runtime",
    ),
    "fxpipe.compat": ("fxpipe.errors", "fxpipe.runtime", "fxpipe.compat"),
    "fxpipe.ir": BASE,
    **dict.fromkeys(HELPERS, (*BASE, "fxpipe.precision")),
    "fxpipe.ops": (*BASE, *HELPERS, "fxpipe.ops"),
    "fxpipe.costs": (*BASE, *HELPERS, "fxpipe.ops", "fxpipe.costs"),
    "fxpipe.capture": (*BASE, *HELPERS, "fxpipe.ops", "fxpipe.capture"),
    "fxpipe.passes": (*BASE, *HELPERS, "fxpipe.ops", "fxpipe.costs"),
    "fxpipe.codegen": (*BASE, *HELPERS, "fxpipe.ops", "fxpipe.codegen"),
}
# safetensors is imported when weights are read, cuda when a GPU is cut, and not before.
RUNTIME_MAY_IMPORT = {"torch", "fxpipe", "safetensors", "cuda", *sys.stdlib_module_names}


def modules() -> Iterator[tuple[str, Path]]:
    for folder, path in FOLDERS.items():
        for file in sorted(path.rglob("*.py")):
            inside = file.relative_to(path)
            if folder == "fxpipe" and inside.parts[0] in ("passes", "codegen"):
                continue  # the links
            parts = [folder, *inside.with_suffix("").parts]
            name = ".".join(parts if folder == "fxpipe" else ["fxpipe", *parts])
            yield name.removesuffix(".__init__"), file


def imports(file: Path) -> set[str]:
    """Modules that a file imports, those only for type checking included."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write absolute imports"
            known = {f"{node.module}.{alias.name}" for alias in node.names} & KNOWN
            found.update(known or {str(node.module)})
    return found


KNOWN = {name for name, _ in modules()}


def below(name: str, tops: tuple[str, ...]) -> bool:
    return any(name == top or name.startswith(top + ".") for top in tops)


@pytest.mark.parametrize(("name", "file"), list(modules()), ids=str)
def test_imports_point_one_way(name, file):
    own = next((top for top in RULES if below(name, (top,))), None)
    if own is None:
        return
    # `fxpipe` itself holds the version.
    found = {imported for imported in imports(file) if below(imported, ("fxpipe",))} - {"fxpipe"}
    allowed = RULES[own]
    if own == "fxpipe.passes":
        allowed = (*allowed, *passes_that_may_be_imported_by(name))
    assert not {imported for imported in found if not below(imported, allowed)}


def passes_that_may_be_imported_by(name: str) -> tuple[str, ...]:
    """Passes stand alone; only linearization, orders, partitioning, bounds and the search don't.

    All but bounds have a simulator, and partitioning and the search have orders to price; the
    search has plans by partitioning beside its own, and bounds.
    """
    simulator = tuple(other for other in KNOWN if other.startswith("fxpipe.passes.simulate"))
    orders = tuple(other for other in KNOWN if other.startswith("fxpipe.passes.order"))
    if name.startswith("fxpipe.passes.linearize"):
        return ("fxpipe.passes.linearize_blocks",)
    if name.startswith("fxpipe.passes.order"):
        return (*orders, *simulator)
    if name.startswith("fxpipe.passes.partition"):
        family = (other for other in KNOWN if other.startswith("fxpipe.passes.partition"))
        return (*family, *orders, *simulator, "fxpipe.passes.checkpoints")
    if name.startswith("fxpipe.passes.search"):
        priced = ("blocks", "costs", "path", "tidy")
        partition = (f"fxpipe.passes.partition_{part}" for part in priced)
        others = ("search", "bound", "partition", "checkpoints")
        return (*orders, *simulator, *partition, *(f"fxpipe.passes.{other}" for other in others))
    if name.startswith("fxpipe.passes.bound"):
        return ("fxpipe.passes.bound",)
    return simulator if name in simulator else ()


def test_runtime_imports_no_more_than_torch_and_safetensors():
    for name, file in modules():
        if below(name, ("fxpipe.runtime",)):
            tops = {imported.partition(".")[0] for imported in imports(file)}
            assert tops <= RUNTIME_MAY_IMPORT, name


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import fxpipe", "torch numba ortools networkx jinja2 typer rich"),
        ("import fxpipe.cli", "torch numba ortools networkx jinja2 rich"),
        ("import fxpipe.runtime", "safetensors numba ortools networkx jinja2 typer rich"),
        ("import fxpipe; fxpipe.load", "numba ortools networkx jinja2 typer rich"),
    ],
)
def test_heavy_libraries_load_when_used(statement, absent):
    # torch itself may load networkx and others: only what fxpipe adds counts.
    code = (
        f"import sys\n{'import torch' if 'torch' not in absent else ''}\n"
        f"before = set(sys.modules)\n{statement}\n"
        f"print(*set({absent!r}.split()) & (set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_help_needs_no_torch(tmp_path):
    code = "import sys; from fxpipe.cli import app; app(['--help'], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=tmp_path)
