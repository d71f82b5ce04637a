"""What a forward writes is put back for when it runs again, and is as it was after that."""

import pytest
import torch
from torch import nn

from fxpipe.runtime.written import Written


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.tensor([True, False]))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("total", torch.tensor(2.0, dtype=torch.float64))


NAMES = [name for name, _ in Counts().named_buffers()]


def values(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def changed(module):
    for buffer in module.buffers():
        buffer.copy_(buffer.logical_not() if buffer.dtype == torch.bool else buffer + 1)


def same(some, others):
    assert all(torch.equal(some[name], others[name]) for name in NAMES)


def test_a_block_has_the_values_from_before_and_leaves_those_from_after():
    module = Counts()
    first, kept = values(module), Written(module, NAMES)
    changed(module)
    later = values(module)
    for _ in range(2):
        with kept.again():
            same(values(module), first)
            assert module.total.dtype == torch.float64
            changed(module)
        same(values(module), later)


def test_what_fails_in_the_block_leaves_them_too():
    module = Counts()
    kept = Written(module, NAMES)
    changed(module)
    later = values(module)
    with pytest.raises(KeyError), kept.again():
        raise KeyError
    same(values(module), later)


def test_a_write_to_one_is_none_to_another_that_a_graph_has_saved():
    module, weight = Counts(), torch.ones(3, requires_grad=True)
    with Written(module, NAMES).again():
        product = weight * module.norm.running_mean
        module.norm.running_var.add_(1)
        module.turned.add_(1)
    product.sum().backward()
