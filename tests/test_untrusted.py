"""Names and texts of a model are untrusted: they give correct code, and nothing of them runs."""

import ast
import csv
import importlib.util
import json

import pytest
import torch
from flat import compile_flat
from torch import nn

import fxpipe

CODE = 'open("ran", "w")'  # what must not run
NAMES = (
    *("class", "None", "match", "print", "_"),  # Python's words
    *("self", "x", "torch", "nn", "F", "Tensor", "dtype", "device", "Stage0"),  # ours
    *("0", "10", "²", "٣", "-1", " ", "a b", "#", "`", "{{ x }}", "{% raw %}", "{x}", "%s"),
    *('"', "'", '"""', "\\", '\\"', "\\N{x}", "\n", "\r", "\0", "\x1b[31m"),
    *(f'"]; {CODE} #', f"'); {CODE} #", f'"""\n{CODE}\n"""', f"{{{{ {CODE} }}}}"),
    *("naïve", "ﬁ", "n\u0303", "\u202e", "😀"),  # not all in normal form
    *("__x", "__class_", "__class__x", "_modules_", "forward_"),
)
METHODS = ("forward", "register_buffer", "T_destination", "__class__", "type")


class Layer(nn.Module):
    """A module, a parameter and buffers of one name, so that its path is written often."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.randn(3)))
        self.register_buffer(f"{name}b", torch.randn(3))
        self.register_buffer(f"{name}c", torch.randn(3), persistent=False)
        self.add_module(f"{name}d", nn.Linear(3, 3))

    def forward(self, x):
        x = self._modules[f"{self.name}d"](x + self._buffers[f"{self.name}b"])
        return x * self._parameters[self.name] + self._buffers[f"{self.name}c"]


class Nasty(nn.Module):
    """Children of all names. `_modules` takes what `add_module` won't."""

    def __init__(self):
        super().__init__()
        self.deep = nn.Module()
        for name in NAMES:
            self.add_module(name, nn.Tanh())
            self.deep.add_module(name, Layer(name))
        for name in METHODS:
            self.deep._modules[name] = Layer("w")

    def forward(self, x):
        for name in NAMES:
            x = self._modules[name](self.deep._modules[name](x))
        for name in METHODS:
            x = x + self.deep._modules[name](x)
        return x


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x):
        return self.b(self.a(x).relu())


@pytest.fixture(autouse=True)
def _nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "ran").exists()


def compiled(model, *args):
    """The package's folder, its code seen to be no more than imports, classes and functions."""
    package = compile_flat(model, args, devices="cpu*2", microbatches=2)
    out = package.write("out", weights=True)
    for path in out.glob("*.py"):
        docstring, *body = ast.parse(path.read_text(encoding="utf-8")).body
        assert isinstance(docstring, ast.Expr)
        assert isinstance(docstring.value, ast.Constant)
        imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in imports:
            name = getattr(node, "module", node.names[0].name)
            assert name in ("torch", "torch.nn", "pathlib", "typing", "fxpipe.runtime", "blocks")
        kinds = {type(node) for node in body if node not in imports}
        assert kinds <= {ast.ClassDef, ast.FunctionDef}
        for one in (node for node in body if isinstance(node, ast.ClassDef)):
            methods = {getattr(node, "name", "docstring") for node in one.body}
            assert methods <= {"docstring", "__init__", "forward"}
    return out


def same(model, out, *args):
    pipe = fxpipe.load(out)
    assert list(pipe.state_dict()) == list(model.state_dict())
    torch.testing.assert_close(pipe(*args), model(*args))
    pipe.load_state_dict(model.state_dict())
    model.load_state_dict(pipe.state_dict())
    return pipe


def test_names_of_modules_parameters_and_buffers():
    model, x = Nasty().double(), torch.randn(4, 3).double()
    out = compiled(model, x)
    pipe = same(model, out, x)
    pipe(x).square().mean().backward()
    model(x).square().mean().backward()
    for (name, found), (own, expected) in zip(
        pipe.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == own
        torch.testing.assert_close(found.grad, expected.grad)
    plan = json.loads((out / "plan.json").read_text())
    assert {state["name"] for state in plan["state"]} >= set(model.state_dict())
    with (out / "schedule.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 2


def test_a_name_that_is_no_unicode_text():
    """A lone surrogate: safetensors can't hold it, all else can."""
    model, x = nn.Sequential(), torch.randn(4, 3)
    for name in ("\ud800", "b"):
        model.add_module(name, nn.Linear(3, 3))
    package = compile_flat(model, (x,), devices="cpu*2", microbatches=2)
    pipe = fxpipe.load(package.write("out"))
    pipe.load_state_dict(model.state_dict())
    torch.testing.assert_close(pipe(x), model(x))
    with pytest.raises(fxpipe.errors.PackageError, match="surrogates"):
        package.write("out", weights=True)


@pytest.mark.parametrize("name", ["class", "nn", "__x", "ﬁ", f'"""\n{CODE}\n"""'], ids=ascii)
def test_names_of_classes_of_repeated_modules(name):
    kind = type(name, (Small,), {})
    model, x = nn.Sequential(*(kind() for _ in range(4))), torch.randn(4, 3)
    same(model, compiled(model, x), x)


@pytest.mark.parametrize(
    "name",
    [
        f'"""\n{CODE}\n"""',
        '"',
        '""""',
        "end\\",
        "{% raw %}",
        "\u202e",
        f"\n\n    {CODE}",
        "",
        "naïve",
    ],
    ids=ascii,
)
def test_names_of_model_classes(name):
    model, x = type(name, (Small,), {})(), torch.randn(4, 3)
    out = compiled(model, x)
    same(model, out, x)
    assert fxpipe.load(out).manifest.model == name


ARGUMENTS = ("torch", "nn", "F", "Tensor", "device", "batch", "list", "__x", "naïve", "ﬁx", "_")


@pytest.mark.parametrize("name", [*ARGUMENTS, "input", "output", "forward", "__class__"])
def test_names_of_arguments(name):
    scope = {}
    exec(f"def forward(self, {name}):\n    return self.b(self.a({name}).relu())", scope)
    model, x = type("Model", (Small,), {"forward": scope["forward"]})(), torch.randn(4, 3)
    same(model, compiled(model, x), x)


def test_keys_of_dicts_and_texts_that_are_constants():
    class Keys(Small):
        def forward(self, given, text):
            total = torch.stack([given[key] for key in given]).sum(0)
            return {key: self.b(self.a(total)) for key in given} | {text: total}

    model, text = Keys(), f'"""\n{CODE}\n"""'
    given = {key: torch.randn(4, 3) for key in (*NAMES[::4], "", "\ud800")}
    pipe = same(model, compiled(model, given, text), given, text)
    assert list(pipe(given, text)) == [*given, text]


SOURCE = f"""\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)

    def forward(self, x):
        x = self.a(x)  # \"\"\" \\\\ \u202e naïve {{{{ 1 }}}} {{% raw %}} \x1b[31m ''' # fmt: off
        text = '''"'''; x = x.relu() * len(text); y = '"; {CODE} #'
        return self.b(x) + len(y)
"""


def test_text_of_the_users_lines_and_files():
    name = "a '''b\\{{ x }} #\u202e.py"
    with open(name, "w", encoding="utf-8") as file:
        file.write(SOURCE)
    spec = importlib.util.spec_from_file_location("model", name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, x = module.Model(), torch.randn(4, 3)
    out = compiled(model, x)
    same(model, out, x)
    assert "naïve" in "".join(path.read_text(encoding="utf-8") for path in out.glob("stage_*.py"))
