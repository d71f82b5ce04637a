"""What torchgpipe 0.0.7 needs of a benchmark: its kind of model, and streams to compute on."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import torch
from torch import Tensor, nn
from torchgpipe import pipeline
from torchgpipe.skip import Namespace, pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Join(nn.Module):
    def forward(self, x: Tensor) -> Iterator[object]:
        skip = yield pop("skip")
        return torch.cat([x, skip], dim=1)


def leaves(row: nn.Sequential) -> Iterator[nn.Module]:
    """The layers of a row of `ConvBlock`s."""
    for block in row:
        yield from (block.conv, block.dropout, block.norm, nn.LeakyReLU(0.01))


def unet_layers(model: nn.Module) -> nn.Sequential:
    """Our U-Net as a row of layers, with torchgpipe's skips."""
    places = [Namespace() for _ in model.encoders]
    layers: list[nn.Module] = []
    for encoder, place in zip(model.encoders, places, strict=True):
        layers += [*leaves(encoder), Stash().isolate(place), nn.MaxPool2d(2)]
    layers += leaves(model.bottleneck)
    for decoder, place in zip(model.decoders, reversed(places), strict=True):
        layers += [nn.Upsample(scale_factor=2), Join().isolate(place), *leaves(decoder)]
    return nn.Sequential(*layers, model.segment)


@contextmanager
def computing_on(streams: list[torch.cuda.Stream]) -> Iterator[None]:
    """Let torchgpipe's partitions, which ask for their devices' streams in order, get these."""
    before, following = pipeline.current_stream, cycle(streams)
    pipeline.current_stream = lambda device: next(following)
    try:
        yield
    finally:
        pipeline.current_stream = before
