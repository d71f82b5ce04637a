"""Running a graph, or the model itself, leaves the model as it was."""

import torch
from torch import nn

from fxpipe.ops.interpret import untouched


def test_hooks_that_a_forward_installs_go_with_the_attribute_that_says_so():
    class Hooked(nn.Linear):
        def forward(self, x):
            if not getattr(self, "hooked", False):
                self.register_forward_hook(lambda module, args, output: output + 1)
                self.hooked = True
            return super().forward(x)

    model = Hooked(2, 2)
    with untouched(model, {}):
        model(torch.ones(1, 2))
        assert model.hooked
        assert model._forward_hooks
    assert not hasattr(model, "hooked")
    assert not model._forward_hooks
