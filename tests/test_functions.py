"""Custom autograd.Functions: one op each, copied into the package as the user wrote them."""

import logging
import math
import re

import other_functions
import pytest
import torch
from flat import verified
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxpipe.capture import capture
from fxpipe.capture.functions import Functions
from fxpipe.errors import CaptureError
from fxpipe.runtime.package import read

LIMIT = 0.75
LOG = logging.getLogger(__name__)
COUNT = 0


def steep(x):
    return torch.exp(-math.pi * x.square())


class Round(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Pair(Function):
    """Two inputs and outputs, a number, what is no tensor in ctx, a size among it."""

    @staticmethod
    def forward(ctx, x, y, scale):
        ctx.save_for_backward(x, y)
        ctx.scale, ctx.rows = scale, x.size(0)
        return x * y * scale, x + y

    @staticmethod
    def backward(ctx, product, total):
        x, y = ctx.saved_tensors
        both = product.view(ctx.rows, -1) * ctx.scale
        return both * y + total, both * x + 2 * total, None


class Weighted(Function):
    """A gradient for the weight alone, and only if it wants one; constants and helpers outside."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: "nn.Parameter", other: Round = None) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.linear(steep(x), weight)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        wanted = gradient.t() @ steep(x).clamp(max=LIMIT) if ctx.needs_input_grad[1] else None
        return None, wanted, None


class Separate(Function):
    """Its context is set apart, and one output has no gradient."""

    @staticmethod
    def forward(x):
        return x.tanh(), x.argmax(1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx, gradient, _):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y) * 0.5


class Inherited(Round):
    @staticmethod
    def forward(ctx, x):
        return other_functions.halved(x).floor()


def scaling(factor):
    class Scaled(Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

        @staticmethod
        def backward(ctx, gradient):
            return gradient * factor * 2

    return Scaled


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.last = nn.Linear(6, 6)
        self.double, self.again, self.triple = scaling(2.0), scaling(2.0), scaling(3.0)

    def early(self, x):
        product, total = Pair.apply(x, x * 2, 1.5)
        return Round.apply(product * 3) + total

    def forward(self, x):
        x = Inherited.apply(self.first(x))  # one input that wants no gradient, if first is frozen
        x = checkpoint(self.early, x, use_reentrant=False)
        x = Weighted.apply(x, self.weight, None)
        x = self.triple.apply(self.again.apply(self.double.apply(x)))
        y, place = Separate.apply(self.last(x))
        return Round.apply(y * 4) + other_functions.F.apply(y) + place.unsqueeze(1)


def rows(batch):
    return {"x": torch.randn(batch, 6)}


@pytest.mark.parametrize("mode", ["never", "always"])
def test_packages_hold_functions_that_differentiate_as_the_users(mode, tmp_path):
    package = verified(Mixed, rows, tmp_path, devices="cpu*2", checkpoint=mode)
    text = package.files["functions.py"]
    classes = re.findall(r"^class (\w+)", text, re.MULTILINE)
    # One class for equal uses, another for another constant; what is taken gets a number.
    assert sorted(classes) == sorted(
        ["Round", "Inherited", "Pair", "Weighted", "Scaled", "Scaled_2", "Separate", "F_2"]
    )
    assert {"factor = 2.0", "factor_2 = 3.0", "LIMIT = 0.75"} <= set(text.splitlines())
    stages = [text for name, text in package.files.items() if name.startswith("stage_")]
    assert all("from .functions import" in stage for stage in stages)
    assert "functions.py" in read(tmp_path / "out").files


def test_a_gradient_that_nobody_wants_when_captured_is_the_functions_own_later():
    model = Mixed()
    model.first.requires_grad_(False)
    captured = capture(model, (torch.randn(4, 6),), {})
    applied = [node.target for node in captured.graph.nodes if "apply" in str(node.target)]
    assert "Inherited" in str(applied[0])


class Logs(Round):
    @staticmethod
    def backward(ctx, gradient):
        LOG.info("backward")
        return gradient


class Counts(Round):
    @staticmethod
    def backward(ctx, gradient):
        global COUNT
        COUNT += 1
        return gradient


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (Logs, "Logs uses `LOG`: it is a Logger, neither code nor a plain constant"),
        (Counts, "it writes the global `COUNT`"),
        (type("Made", (Round,), {}), "its source can't be"),
    ],
)
def test_what_no_package_can_hold_is_refused_by_name(function, says):
    with pytest.raises(CaptureError, match=re.escape(says)):
        Functions().own(function)


def test_the_line_that_applies_it_is_named():
    class Uses(nn.Module):
        def forward(self, x):
            return Logs.apply(x * 2)

    with pytest.raises(CaptureError, match=r"return Logs\.apply\(x \* 2\)"):
        capture(Uses(), (torch.randn(4, 6, requires_grad=True),), {})
