"""An optimizer's state is kept under the original names of what it trains."""

import pytest
import torch
import toys
from torch import nn

import fxpipe
from fxpipe.errors import WeightsError


def test_an_optimizer_of_fewer_parameters_keeps_their_names(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    optimizer = torch.optim.AdamW(pipe.named_parameters(), 0.05)
    fxpipe.checkpoint.save(tmp_path / "last", pipe, optimizer)
    last = [(name, p) for name, p in pipe.named_parameters() if "last" in name]
    fewer = torch.optim.AdamW(last, 1.0)
    fxpipe.checkpoint.load(tmp_path / "last", pipe, fewer)
    (group,) = fewer.param_groups
    assert (group["lr"], group["param_names"]) == (0.05, [name for name, _ in last])


def test_what_is_not_there_or_not_the_pipelines_is_named(tmp_path):
    _, pipe = toys.both(tmp_path, toys.CHAIN)
    path = tmp_path / "last"
    fxpipe.checkpoint.save(path, pipe)
    optimizer = torch.optim.AdamW(pipe.parameters())
    with pytest.raises(WeightsError, match=r"no optimizer state of 8 parameters: body.stages.bias"):
        fxpipe.checkpoint.load(path, pipe, optimizer)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(WeightsError, match=r"a parameter of shape \[2\]"):
        fxpipe.checkpoint.save(path, pipe, foreign)
