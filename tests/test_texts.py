"""No size is fixed to write a text that nobody reads; one that is used as a key has it fixed."""

import pytest
import torch
from torch import nn

from fxpipe.capture import capture
from fxpipe.errors import CaptureError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head6 = nn.Linear(6, 2)

    def told(self, is_well, message):
        def tell():
            return message

        if not is_well:
            raise ValueError(tell())


def tells(self, x):
    print(f"{x.size(0)} rows of {x.size(1):4d}", f"{x.size(0)!r}")
    return self.head6(x)


def tells_another_function(self, x):
    self.told(x.dim() == 2, f"{x.size(0)} rows and {x.dim()} dimensions")
    return self.head6(x)


def tells_of_a_tensor_too(self, x):
    message = f"{x.size(0)} rows, {(x > 0).sum()} of them above 0"
    return self.head6(x if len(self.head6.weight) else message)


def tells_how_many_are_chosen(self, x):
    chosen = x[x[:, 0] > 0]
    self.told(x.dim() == 2, f"{chosen.size(0)} of {x.size(0)} rows")
    self.told(x.dim() == 2, f"{chosen.size(0)} rows")
    return self.head6(x) + chosen.sum()


def checks_sizes(self, x):
    h = self.head6(x)
    torch._check(h.size(0) == x.size(0), lambda: f"{h.size(0)} rows of {x.size(0)}")
    torch._check_value(x.size(0) > 0, message=lambda: f"{x.size(0)} rows")
    return h


def takes_a_layer_by_its_width(self, x):
    return getattr(self, f"head{x.size(1)}")(x)


@pytest.mark.parametrize(
    "forward",
    [
        tells,
        tells_another_function,
        tells_of_a_tensor_too,
        tells_how_many_are_chosen,
        checks_sizes,
        takes_a_layer_by_its_width,
    ],
)
def test_rows_stay_open(forward):
    captured = capture(type("Told", (Model,), {"forward": forward})(), (torch.randn(4, 6),), {})
    assert (captured.sizes, captured.conditions) == ({}, ())
    assert captured.specs[captured.outputs[0]].shape == ("batch", 2)


@pytest.mark.parametrize("form", ["", "d", "3d"])
def test_a_text_of_rows_that_says_what_to_do_is_refused_at_its_line(form):
    class Keyed(Model):
        def __init__(self):
            super().__init__()
            self.by_rows = {f"{rows:{form}} rows": rows for rows in range(9)}

        def forward(self, x):
            key = f"{x.size(0):{form}} rows"
            return self.head6(x) * self.by_rows[key]

    with pytest.raises(CaptureError, match=r"one batch size only, .*\n?.*self\.by_rows\[key\]"):
        capture(Keyed(), (torch.randn(4, 6),), {})
