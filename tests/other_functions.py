"""A second file of the user's, which means something else by some names."""

from torch.autograd import Function

LIMIT = 0.25


def halved(x):
    return x * 0.5


class F(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(max=LIMIT)

    @staticmethod
    def backward(ctx, gradient):
        return halved(gradient)
