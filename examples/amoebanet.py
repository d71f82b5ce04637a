"""AmoebaNet-D (Real et al., 2018), as GPipe's and torchgpipe's speed benchmarks have it.

    fxpipe compile examples/amoebanet.py --devices 2 -o build/amoebanet

(LAYERS, FILTERS) set the size; torchgpipe's table has (18, 256) on images of 224 x 224. A cell
takes the outputs of the two cells before it, so every cut is crossed by two values.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS = 6
FILTERS = 64
IMAGE = 64
CLASSES = 10

# What each node of a cell adds up: two operations, each on one of the values so far. Value 0 is the
# output of the cell before, 1 that of the one before that; nodes give 2 to 6. A cell's output are
# the values of `CONCAT`, side by side, as in the authors' code (the paper's figure differs).
NORMAL = (
    (("conv_1x1", 1), ("max_pool_3x3", 1)),
    (("none", 1), ("conv_1x7_7x1", 0)),
    (("conv_1x1", 0), ("conv_1x7_7x1", 0)),
    (("max_pool_3x3", 2), ("none", 2)),
    (("avg_pool_3x3", 1), ("conv_1x1", 5)),
)
NORMAL_CONCAT = (0, 3, 4, 6)
REDUCTION = (
    (("max_pool_2x2", 0), ("max_pool_3x3", 0)),
    (("none", 2), ("conv_3x3", 1)),
    (("conv_1x7_7x1", 2), ("max_pool_3x3", 2)),
    (("none", 3), ("max_pool_2x2", 1)),
    (("avg_pool_3x3", 2), ("conv_1x1", 3)),
)
REDUCTION_CONCAT = (4, 5, 6)


class ReluConvNorm(nn.Module):
    """Activation, convolution that keeps the size but for its stride, batch norm."""

    def __init__(
        self, channels: int, out_channels: int, kernel: tuple[int, int] = (1, 1), stride: int = 1
    ) -> None:
        super().__init__()
        # A kernel of 1 x 7 strides along the 7 only: 7 x 1 follows.
        strides = (
            stride if kernel[0] == kernel[1] else tuple(stride if k > 1 else 1 for k in kernel)
        )
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.conv = nn.Conv2d(channels, out_channels, kernel, strides, padding, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(F.relu(x)))


class HalveSize(nn.Module):
    """Half of the output from the even rows and columns, half from the odd ones."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels, out_channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, out_channels // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        return self.norm(torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], dim=1))


def operation(name: str, channels: int, stride: int) -> nn.Module:
    """An operation of a cell; convolutions of a larger kernel work on a quarter of the channels."""
    quarter = channels // 4
    match name:
        case "none":
            return nn.Identity()
        case "max_pool_2x2":
            return nn.MaxPool2d(2, stride)
        case "max_pool_3x3":
            return nn.MaxPool2d(3, stride, padding=1)
        case "avg_pool_3x3":
            return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)
        case "conv_1x1":
            return ReluConvNorm(channels, channels, stride=stride)
        case "conv_3x3":
            middle = [ReluConvNorm(quarter, quarter, (3, 3), stride)]
        case "conv_1x7_7x1":
            middle = [ReluConvNorm(quarter, quarter, kernel, stride) for kernel in ((1, 7), (7, 1))]
    return nn.Sequential(ReluConvNorm(channels, quarter), *middle, ReluConvNorm(quarter, channels))


class Cell(nn.Module):
    """(before, x) of the two cells before to this one's output; a reduction halves the size."""

    def __init__(
        self, before: int, channels: int, width: int, reduction: bool, after_reduction: bool
    ) -> None:
        super().__init__()
        nodes = REDUCTION if reduction else NORMAL
        self.concat = REDUCTION_CONCAT if reduction else NORMAL_CONCAT
        self.sources = tuple(source for node in nodes for _, source in node)
        self.squeeze = ReluConvNorm(channels, width)
        self.squeeze_before: nn.Module = nn.Identity()
        if after_reduction:
            self.squeeze_before = HalveSize(before, width)
        elif before != width:
            self.squeeze_before = ReluConvNorm(before, width)
        self.operations = nn.ModuleList(
            operation(name, width, stride=2 if reduction and source < 2 else 1)
            for node in nodes
            for name, source in node
        )

    def forward(self, before: Tensor, x: Tensor) -> Tensor:
        values = [self.squeeze(x), self.squeeze_before(before)]
        results = zip(self.operations, self.sources, strict=True)
        for (left, a), (right, b) in zip(results, results, strict=True):
            values.append(left(values[a]) + right(values[b]))
        return torch.cat([values[k] for k in self.concat], dim=1)


class AmoebaNet(nn.Module):
    """Images (batch, 3, height, width), sizes that 32 divides, to logits (batch, classes)."""

    def __init__(
        self, layers: int = LAYERS, filters: int = FILTERS, classes: int = CLASSES
    ) -> None:
        super().__init__()
        width = filters // 4
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width)
        )
        self.cells = nn.ModuleList()
        normal = [False] * (layers // 3)
        before, channels, after_reduction = width, width, False
        for reduction in (True, True, *normal, True, *normal, True, *normal):
            width *= 2 if reduction else 1
            cell = Cell(before, channels, width, reduction, after_reduction)
            self.cells.append(cell)
            before, channels, after_reduction = channels, width * len(cell.concat), reduction
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        before = x = self.stem(x)
        for cell in self.cells:
            before, x = x, cell(before, x)
        return self.classify(x.mean((2, 3)))


def build() -> nn.Module:
    return AmoebaNet()


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, IMAGE, IMAGE),)


def targets(batch: int) -> Tensor:
    return torch.arange(batch) % CLASSES


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)
