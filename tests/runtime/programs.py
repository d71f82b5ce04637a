"""A larger program around a toy, of which the toy alone is a pipeline."""

import torch
from torch import nn
from toys import pieces, rows

from fxpipe.runtime.random import microbatch_seeds
from fxpipe.runtime.structure import describe


class Program(nn.Module):
    """A layer before the model, and another with dropout and a loss after; one may be frozen."""

    def __init__(self, model, toy, frozen="after"):
        super().__init__()
        torch.manual_seed(3)
        self.before = nn.Linear(6, 6).double().requires_grad_(frozen != "before")
        self.after = nn.Linear(2, 2).double().requires_grad_(frozen != "after")
        self.integer = toy.integer
        self.model = [model]  # no child: its state is compared on its own

    def forward(self, x, *others, share):
        given = x if self.integer else self.before(x + torch.randn_like(x))
        loss = torch.zeros((), dtype=torch.float64)
        for leaf in describe(self.model[0](given, *others))[1]:
            if leaf.requires_grad and leaf.dim() > 1:
                leaf = nn.functional.dropout(self.after(leaf[..., :2]), 0.2)
            if leaf.requires_grad:
                loss = loss + leaf.pow(2).mean()
        (loss * share).backward()
        return loss.detach()


def plain(program, toy, inputs, m):
    """The closure's results on each micro-batch, after its seed."""
    batch, losses = len(inputs[0]), []
    for seed, piece, n in zip(
        microbatch_seeds(m), pieces(toy, inputs, m), rows(batch, m), strict=True
    ):
        torch.manual_seed(seed)
        losses.append(program(*piece, share=n / batch))
    return losses
