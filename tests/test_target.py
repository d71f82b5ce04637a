"""A TARGET is loaded, or the message says what it lacks and at which line."""

import re

import pytest
import torch
from torch import nn

from fxpipe import target
from fxpipe.errors import TargetError

MODEL = """
from torch import nn
import torch

def build():
    return nn.Linear(4, 2)

def other():
    return nn.Linear(4, 3)

def inputs(batch):
    return (torch.randn(batch, 4),)
"""


def use(text: str) -> None:
    loaded = target.load(text)
    loaded.inputs(2, loaded.build())


def message(text: str) -> str:
    with pytest.raises(TargetError) as caught:
        use(text)
    return str(caught.value)


def test_file_builds_the_same_model_and_inputs_twice(write):
    loaded = target.load(write(MODEL))
    model = loaded.build()
    assert torch.equal(loaded.build().weight, model.weight)
    (x,) = loaded.inputs(3, model).args
    assert torch.equal(loaded.inputs(3, model).args[0], x)
    assert x.shape == (3, 4)
    assert loaded.targets(3) is None
    assert loaded.loss is None


def test_factory_after_a_colon(write):
    assert target.load(write(MODEL) + ":other").build().out_features == 3


def test_module_in_the_current_folder(write):
    write("", "toy_package/__init__.py")
    write(MODEL, "toy_package/zoo.py")
    assert isinstance(target.load("toy_package.zoo:other").build(), nn.Linear)


class Scaled(nn.Module):
    def forward(self, input, scale=None): ...


@pytest.mark.parametrize(
    ("made", "args", "kwargs"),
    [
        ("torch.ones(batch)", 1, []),
        ("(torch.ones(batch), None)", 2, []),
        ("{'input': torch.ones(batch), 'scale': 2.0}", 0, ["input", "scale"]),
    ],
)
def test_inputs_are_positional_or_by_name(write, made, args, kwargs):
    text = MODEL.replace("(torch.randn(batch, 4),)", made)
    inputs = target.load(write(text)).inputs(2, Scaled())
    assert len(inputs.args) == args
    assert list(inputs.kwargs) == kwargs


def test_messages_name_what_is_missing(write):
    assert "there is no file nowhere.py" in message("nowhere.py")
    assert ". is a folder: TARGET is model.py" in message(".")
    assert "'' names no file and no module: TARGET is model.py" in message("")
    assert "':build' names no file" in message(":build")
    assert "no module nowhere" in message("nowhere.model:build")
    assert "defines no `build`" in message(write(MODEL.replace("build", "make")))
    assert "defines no `third`" in message(write(MODEL) + ":third")
    assert "defines no `inputs`" in message(write(MODEL.replace("inputs", "examples")))
    assert "`build` in toy_model.py must be a function" in message(
        write(MODEL + "\nbuild = nn.Linear(4, 2).weight")
    )


def test_messages_name_what_is_of_the_wrong_type(write):
    text = MODEL.replace("return nn.Linear(4, 2)", "pass")
    assert "build() in toy_model.py must return a torch.nn.Module, not None" in message(write(text))
    text = MODEL.replace("(torch.randn(batch, 4),)", "[torch.randn(batch, 4)]")
    assert "inputs(2) in toy_model.py must return a tuple" in message(write(text))
    assert "not a list" in message(write(text))
    text = MODEL.replace("(torch.randn(batch, 4),)", "3")
    assert "not an int" in message(write(text))


@pytest.mark.parametrize(
    ("good", "bad", "called", "why"),
    [
        ("def build():", "def build(width):", "build()", "missing a required argument: 'width'"),
        ("inputs(batch)", "inputs()", "inputs(batch)", "too many positional arguments"),
        ("(batch)", "(batch, *, rows)", "inputs(batch)", "missing a required argument: 'rows'"),
        ("other()", "targets()", "targets(batch)", "too many positional arguments"),
        ("other()", "loss(output)", "loss(output, target)", "too many positional arguments"),
    ],
)
def test_a_function_that_takes_something_else_is_told_with_its_line(write, good, bad, called, why):
    text = MODEL.replace(good, bad)
    told = message(write(text))
    assert f"in toy_model.py is called as {called}, which it does not take" in told
    assert why in told.replace("keyword-only ", "")  # says Python from 3.12 on
    assert f"write `def {called}: ...`" in told
    number, line = next((n, line) for n, line in enumerate(text.splitlines(), 1) if bad in line)
    assert told.endswith(f"toy_model.py, line {number}: {line}")


def test_a_class_or_a_function_without_a_signature_is_called_as_it_is(write):
    text = MODEL + "\nclass Model(nn.Linear):\n    def __init__(self): super().__init__(4, 2)"
    loaded = target.load(write(text + "\nloss = torch.dist") + ":Model")
    assert isinstance(loaded.build(), nn.Linear)


def test_arguments_that_forward_does_not_take_are_named(write):
    name = write(MODEL.replace("(torch.randn(batch, 4),)", "{'foo': torch.randn(batch, 4)}"))
    with pytest.raises(TargetError, match=r"inputs\(8\) .* returned as arguments foo: .*'input'"):
        target.load(name).inputs(8, Scaled())


@pytest.mark.parametrize(
    "made",
    [
        "{'scale': torch.randn(3), 'input': torch.randn(batch, 4)}",
        "{'input': torch.randn(1, 4), 'scale': torch.randn(batch)}",
    ],
)
def test_the_rows_are_those_of_the_first_input_that_forward_takes_with_more_than_one(write, made):
    name = write(MODEL.replace("(torch.randn(batch, 4),)", made))
    target.load(name).inputs(8, Scaled())


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("torch.randn(4, 4)", "returned 4 rows, since 'input' has shape [4, 4]"),
        ("torch.randn(1, 4)", "returned 1 row, since 'input' has shape [1, 4]"),
        ("(torch.randn(1, 4), torch.randn(7))", "returned 7 rows, since 'scale' has shape [7]"),
    ],
)
def test_another_number_of_rows_than_was_asked_for_is_refused(write, made, says):
    name = write(MODEL.replace("(torch.randn(batch, 4),)", made))
    with pytest.raises(TargetError, match=re.escape(f"inputs(8) in toy_model.py {says}")):
        target.load(name).inputs(8, Scaled())


def test_exceptions_of_the_file_are_told_with_the_call_and_the_line(write):
    text = write(MODEL.replace("(4, 2)", "(4, 'b')"))
    assert "build() in toy_model.py raised TypeError" in message(text)
    assert "toy_model.py, line 6: return nn.Linear(4, 'b')" in message(text)
    text = write(MODEL.replace("torch.randn(batch, 4)", "torch.randn(4)[batch + 2]"))
    assert "inputs(2) in toy_model.py raised IndexError" in message(text)
    assert "toy_model.py, line 12: return" in message(text)
