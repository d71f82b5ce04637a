"""Calls that Dynamo has no rule for, and that change nothing, do not stand in the way."""

import pytest
import torch
from flat import verified
from torch import nn

from fxpipe.capture import capture


def asks_for_gradients(self, x):
    x = x[:, None]
    x.requires_grad = True
    return self.linear(x)


def draws_by_the_default_generator(self, x):
    return self.linear(x) + torch.randn((x.size(0), 2), generator=None)


def asks_torchscripts_way(self, x):
    return self.linear(x) if torch.jit.isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize(
    "forward", [asks_for_gradients, draws_by_the_default_generator, asks_torchscripts_way]
)
def test_it_is_captured(forward):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 2)

    Model.forward = forward
    assert capture(Model(), (torch.randn(4, 6),), {}).checked == "train and eval"


class Translates(nn.Module):
    """A mask by which torch takes the kernel for causal attention, and needs none."""

    def __init__(self):
        super().__init__()
        self.both = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, x):
        return self.both(x, x, tgt_mask=self.mask(x.size(1)))

    def mask(self, n):
        return nn.Transformer.generate_square_subsequent_mask(n)


class SeesTheFirst(Translates):
    """All may look at the first place."""

    def mask(self, n):
        mask = super().mask(n)
        mask[:, :1] = 0
        return mask


@pytest.mark.parametrize(("kind", "says"), [(Translates, True), (SeesTheFirst, False)])
def test_a_mask_that_is_known_to_be_causal_is_none(kind, says, tmp_path):
    verified(kind, lambda rows: {"x": torch.randn(rows, 5, 8)}, tmp_path)
    text = "".join(path.read_text() for path in (tmp_path / "out").glob("*.py"))
    assert ("is_causal=True" in text) == says


def test_a_size_that_data_decides_may_be_a_multiple_of_the_batch():
    """Of 16 times, whose bound torch rounds up."""

    class Sounds(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.sound = nn.Embedding(11, 4), nn.Linear(6, 16)

        def forward(self, ids, sounds):
            words, heard = self.words(ids), self.sound(sounds)
            mask = (ids == 9)[..., None].expand_as(words)
            torch._check(words[mask].numel() == heard.numel())
            return words.masked_scatter(mask, heard)

    ids = torch.tensor([0, 9, 9, 9, 9, 1]).repeat(4, 1)
    assert capture(Sounds(), (ids, torch.randn(4, 6)), {}).checked == "train and eval"
