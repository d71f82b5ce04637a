"""Models that are on a GPU are compiled there, and come to the plain model's numbers."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

import fxpipe

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
EXAMPLES = Path(__file__).parents[1] / "examples"


def on_gpu(tree):
    def move(one):
        return one.to("cuda", torch.float64 if one.is_floating_point() else None)

    return tree_map_only(torch.Tensor, move, tree)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("name", ["gpt2", "resnet", "unet"])
def test_an_example_trains_as_the_plain_model_does(name, schedule, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLES)])
    file = importlib.import_module(name)
    torch.manual_seed(0)
    model = file.build().cuda().double()
    for module in model.modules():
        if hasattr(module, "p"):  # one that drops values
            module.p = 0.0
    batch, target = on_gpu((file.inputs(8), file.targets(8)))
    args, kwargs = (batch, {}) if isinstance(batch, tuple) else ((), batch)
    package = fxpipe.compile(
        model,
        args,
        kwargs,
        devices=["cuda:0", "cuda:0"],
        microbatches=4,
        loss_fn=file.loss,
        target=target,
        schedule=schedule,
    )
    pipe = fxpipe.load(package.write(tmp_path / "out", weights=True)).double()
    pipe.step(*args, **kwargs, target=target, loss_fn=file.loss)
    for k in range(4):
        rows = slice(2 * k, 2 * k + 2)
        mine, named, wanted = tree_map_only(
            torch.Tensor, lambda one, rows=rows: one[rows], (args, kwargs, target)
        )
        (file.loss(model(*mine, **named), wanted) / 4).backward()
    found = dict(pipe.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[key].grad, parameter.grad, rtol=1e-8, atol=1e-11)
