"""A gradient that is not there, where one is waited for."""

import pytest
import torch

from fxpipe.errors import StageError
from fxpipe.runtime.distributed.absence import is_absent, mark_absent

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_gradient_is_taken_for_absent(dtype):
    gradient = torch.randn(3, 2, dtype=dtype).t()
    values = (0.0, torch.inf, torch.nan, -torch.nan)
    assert not is_absent(gradient)
    assert not any(is_absent(torch.full_like(gradient, value)) for value in values)
    mark_absent(gradient, "gradient x")
    assert is_absent(gradient)
    assert not is_absent(gradient + gradient)


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_any_shape_will_do(shape):
    gradient = torch.zeros(shape)
    mark_absent(gradient, "gradient x")
    assert is_absent(gradient) == bool(gradient.numel())


def test_on_a_gpu_the_loss_has_to_help():
    with pytest.raises(StageError, match=r"gradient x was there .* 0 \* output\.sum\(\)"):
        mark_absent(torch.zeros(2, device="meta"), "gradient x")
