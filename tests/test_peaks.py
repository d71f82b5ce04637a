"""The memory that a plan predicts is what a step holds, where a head with many classes rules it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe

CLASSES, WIDTH = 8000, 32


class Words(nn.Module):
    """An embedding, layers, and a head that is the embedding again, or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(
    ("schedule", "tied"),
    [
        *((schedule, False) for schedule in ("1f1b", "gpipe", "zb-h1", "zb-v")),
        *((schedule, True) for schedule in ("1f1b", "zb-v")),
    ],
)
def test_the_heads_lane_holds_no_more_than_predicted_nor_much_less(tmp_path, schedule, tied):
    ids = torch.randint(CLASSES, (8, 16))
    package = fxpipe.compile(
        Words(tied),
        (ids,),
        devices="cpu*2",
        microbatches=4,
        schedule=schedule,
        loss_fn=cross_entropy,
        target=ids,
    )
    pipe = fxpipe.load(package.write(tmp_path / "out", weights=True))
    pipe.step(ids, target=ids, loss_fn=cross_entropy)
    held = []
    for _ in range(3):
        with pipe.memory() as memory:
            pipe.step(ids, target=ids, loss_fn=cross_entropy)
        held.append(max(peak.measured_bytes for peak in memory.peaks))
    predicted = max(peak.predicted_bytes for peak in memory.peaks)
    assert max(held) <= predicted <= 1.1 * max(held)
