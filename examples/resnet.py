"""ResNet-101 in plain torch, with batch norm and in-place activations.

    fxpipe compile examples/resnet.py --devices 2 -o build/resnet

WIDTH 64 is the paper's (He et al., arXiv 1512.03385); the default is small enough for a laptop.
BLOCKS, those of the third of four groups, are 23 in ResNet-101, 6 in ResNet-50.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16
BLOCKS = 23
IMAGE = 64
CLASSES = 100


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around which the input is added."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = self.expansion * channels
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to logits (batch, classes)."""

    def __init__(
        self,
        blocks: tuple[int, ...] = (3, 4, BLOCKS, 3),
        width: int = WIDTH,
        classes: int = CLASSES,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layers = nn.Sequential()
        in_channels = width
        for level, n_blocks in enumerate(blocks):
            layer = nn.Sequential()
            for block in range(n_blocks):
                stride = 2 if level > 0 and block == 0 else 1
                layer.append(Bottleneck(in_channels, width * 2**level, stride))
                in_channels = Bottleneck.expansion * width * 2**level
            self.layers.append(layer)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(in_channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layers(x)
        return self.fc(self.avgpool(x).flatten(1))


def build() -> nn.Module:
    return ResNet()


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, IMAGE, IMAGE),)


def targets(batch: int) -> Tensor:
    return torch.arange(batch) % CLASSES


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)
