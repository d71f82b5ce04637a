"""U-Net, as torchgpipe's speed benchmark has it: long skips join each encoder to its decoder.

    fxpipe compile examples/unet.py --devices 2 -o build/unet

(B, C) set the size: B blocks of convolutions per level and C channels at the top; torchgpipe's
tables use (5, 64) and more on images of 192 x 192.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEPTH = 5
B = 2
C = 16
IMAGE = 64


class ConvBlock(nn.Module):
    """Convolution, dropout, normalization, activation."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.dropout = nn.Dropout2d(0.1)
        self.norm = nn.InstanceNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.norm(self.dropout(self.conv(x))), negative_slope=0.01)


def conv_blocks(n_blocks: int, in_channels: int, channels: int, out_channels: int) -> nn.Sequential:
    """`n_blocks` blocks with `channels` between them."""
    widths = [in_channels, *[channels] * (n_blocks - 1), out_channels]
    return nn.Sequential(*map(ConvBlock, widths, widths[1:]))


class UNet(nn.Module):
    """Images (batch, in_channels, height, width) to masks (batch, out_channels, height, width)."""

    def __init__(
        self,
        depth: int = DEPTH,
        n_blocks: int = B,
        channels: int = C,
        in_channels: int = 3,
        out_channels: int = 1,
    ) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth)]
        self.encoders = nn.ModuleList(
            conv_blocks(n_blocks, before, width, width)
            for before, width in zip([in_channels, *widths], widths, strict=False)
        )
        self.down = nn.MaxPool2d(2)
        self.bottleneck = conv_blocks(n_blocks, widths[-1], 2 * widths[-1], widths[-1])
        self.decoders = nn.ModuleList(
            conv_blocks(n_blocks, 2 * width, width // 2, width // 2) for width in reversed(widths)
        )
        self.up = nn.Upsample(scale_factor=2)
        self.segment = nn.Conv2d(channels // 2, out_channels, kernel_size=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.append(x)
            x = self.down(x)
        x = self.bottleneck(x)
        for decoder, skip in zip(self.decoders, reversed(skips), strict=True):
            x = decoder(torch.cat([self.up(x), skip], dim=1))
        return self.segment(x)


def build() -> nn.Module:
    return UNet()


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, IMAGE, IMAGE),)


def targets(batch: int) -> Tensor:
    """Masks to learn: a disc in the middle of each image."""
    line = torch.linspace(-1, 1, IMAGE)
    disc = (line[:, None] ** 2 + line[None, :] ** 2 < 0.5).float()
    return disc.expand(batch, 1, IMAGE, IMAGE)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target)
