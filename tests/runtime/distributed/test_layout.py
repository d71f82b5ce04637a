"""A message tells what it is in numbers, and is read as it was."""

import pytest
import torch

from fxpipe.runtime.distributed.layout import Layout, header_of, read_header


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 0),
        torch.tensor(True),
        torch.randn(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
        torch.randn(2, 3, dtype=torch.complex64).T,
        torch.zeros((1,) * 64),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)[:4]}",
)
def test_it_is_read_as_it_was_told_and_lies_as_it_did(tensor):
    layout = Layout.of(tensor, gradient=tensor.is_floating_point())
    found, shape = read_header(header_of(layout, tensor.shape))
    assert (found, tuple(shape)) == (layout, tuple(tensor.shape))
    assert found.empty(shape, tensor.device).stride() == torch.empty_like(tensor).stride()


def test_nothing_is_told_too():
    assert read_header(header_of(None, ())) == (None, ())
