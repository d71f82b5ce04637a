"""A package that runs on a GPU is compared with the plain model there."""

from pathlib import Path

import pytest
import torch

import fxpipe
from fxpipe import target as targets
from fxpipe.verify import verify

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["gpt2", "resnet", "unet"])
def test_an_example_is_verified_where_it_runs(name, tmp_path):
    target = targets.load(str(EXAMPLES / f"{name}.py"))
    model = target.build()
    made = target.inputs(8, model)
    package = fxpipe.compile(
        model,
        made.args,
        made.kwargs,
        devices=["cuda:0", "cuda:0"],
        microbatches=4,
    )
    result = verify(package.write(tmp_path / "out"), target, batch=10)
    assert result.equal, result
