"""A stage that does what plan.json says it doesn't is told so at its first forward."""

import json

import pytest
import torch
from flat import compile_flat
from torch import nn

import fxpipe
from fxpipe.errors import StageError


class Drops(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return self.last(self.drop(self.first(x)) + self.calls)


X = torch.randn(8, 8)


def compiled(tmp_path, p=0.0):
    package = compile_flat(Drops(p), (X,), devices="cpu*2", microbatches=4, checkpoint="always")
    return package.write(tmp_path / "out")


def step(pipe):
    return pipe.step(X, loss_fn=lambda output, _: output.square().mean())


def edit(out, old, new):
    """In whichever stage has it."""
    for file in out.glob("stage_*.py"):
        file.write_text(file.read_text().replace(old, new))


def test_a_dropout_that_was_off_as_it_was_compiled_cant_be_turned_on(tmp_path):
    pipe = fxpipe.load(compiled(tmp_path))
    step(pipe)
    pipe.drop.p = 0.5
    with pytest.raises(StageError, match=r"stage_\d.py draws random numbers .* a dropout above 0"):
        step(pipe)
    pipe.drop.p = 0.0
    step(pipe)
    pipe.eval()(X)


@pytest.mark.parametrize("training", [True, False])
def test_one_that_is_off_draws_nothing_in_inference_mode_either(tmp_path, training):
    pipe = fxpipe.load(compiled(tmp_path)).train(training)
    with torch.inference_mode():  # in which a mode sees ops that are made of others
        pipe(X)
    with torch.no_grad():
        pipe(X)


def test_one_that_was_on_may_have_another_rate(tmp_path):
    pipe = fxpipe.load(compiled(tmp_path, p=0.1))
    pipe.drop.p = 0.5
    step(pipe)


def test_an_edit_that_draws_is_told_what_to_say_in_the_plan(tmp_path):
    out = compiled(tmp_path)
    edit(out, "self.drop(", "nn.functional.dropout(")
    with pytest.raises(StageError, match=r'let "random" of the stage be true'):
        step(fxpipe.load(out))
    plan = json.loads((out / "plan.json").read_text())
    for stage in plan["stages"]:
        stage["random"] = True
    (out / "plan.json").write_text(json.dumps(plan))
    pipe = fxpipe.load(out)
    losses = [(torch.manual_seed(3), step(pipe))[1] for _ in range(2)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("write", ["self.calls.add_(1)", "torch._foreach_add_([self.calls], 1)[0]"])
def test_an_edit_that_writes_a_buffer_is_told_to_name_it(write, tmp_path):
    out = compiled(tmp_path)
    edit(out, "self.calls", write)
    with pytest.raises(StageError, match=r"writes the buffer 'calls'.*\"mutated_buffers\""):
        step(fxpipe.load(out))
