"""A twin on another device than the model's shares the memory of one that is there."""

import models
import torch

from fxpipe.capture import capture
from fxpipe.costs.twin import Twin

META = torch.device("meta")


def test_weights_are_moved_once():
    captured = capture(models.Norms(), (torch.randn(4, 3, 8, 8),), {})
    first = Twin(captured, [], None, META)
    second = Twin(captured, [], None, META, like=first)
    pairs = list(zip(first._parameters, second._parameters, strict=True))
    assert all(a is not b for a, b in pairs)
    assert all(a.untyped_storage()._cdata == b.untyped_storage()._cdata for a, b in pairs)
