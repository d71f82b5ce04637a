"""A few models of the benchmarks' zoo: what stock models do, measured, compiled and compared.

`benchmarks/stock_models.py` does so with all of them.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fxpipe import compiler
from fxpipe.capture import capture
from fxpipe.target import Target
from fxpipe.verify import verify

FILE = Path(__file__).parents[1] / "benchmarks" / "zoo.py"
MODELS = (
    "BertForMaskedLM",  # masks, labels, dropout, a tied weight, a dataclass of outputs
    "BloomForCausalLM",  # a custom autograd.Function
    "DLRM",  # bags of embeddings
    "Recomputed",  # checkpointing inside
    "Experts",  # each token to one of them: sizes that depend on values
    "autocast",  # in all stages
)


@pytest.fixture(scope="module")
def zoo():
    spec = importlib.util.spec_from_file_location("zoo", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module
    spec.loader.exec_module(module)
    return module.ZOO


@pytest.mark.parametrize("name", MODELS)
def test_stock_models_go_in_and_what_comes_out_equals_them(name, zoo, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    entry = zoo[name]
    pytest.importorskip(entry.library)
    target = Target(name, str(FILE), str(tmp_path), entry.build, entry.inputs)
    model = target.build()
    inputs = target.inputs(6, model)
    captured = capture(model, inputs.args, inputs.kwargs)
    assert captured.checked == "train and eval"
    monkeypatch.setattr(compiler, "capture_model", lambda *_: captured)
    package = compiler.compile(
        model, inputs.args, inputs.kwargs, devices="cpu*4", microbatches=3, schedule="zb-h1"
    )
    result = verify(package.write(tmp_path / "out"), target, batch=7, dtype=entry.dtype)
    assert result.equal, result
