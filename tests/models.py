"""Small models, each with one thing that a pipeline compiler must get right."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Chain(nn.Module):
    """Four linear layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Skip(nn.Module):
    """The first layer's value is read again by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        x = self.middle(skip)
        return self.last(torch.cat([x, skip], dim=1))


class Norms(nn.Module):
    """Batch norm, an in-place activation, dropout, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x))) * self.scale
        x = F.dropout(x, 0.25, self.training)
        return self.head(x.mean((2, 3)))


class Tied(nn.Module):
    """The embedding's weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


@dataclass
class Answer:
    logits: Tensor
    hidden: tuple[Tensor, Tensor | None]
    name: str = "answer"


class Structured(nn.Module):
    """Nested inputs, keyword and constant ones, a dataclass out; state that is easily lost."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.table = torch.arange(6.0)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 3)

    def forward(
        self, pair: tuple[Tensor, Tensor], *, weight: Tensor, negate: bool = False
    ) -> Answer:
        self.calls.add_(1)
        x, y = pair
        rows, columns = x.shape
        x = (x.view(rows, 2, columns // 2).transpose(1, 2).reshape(rows, -1) + y) @ self.mask
        hidden = self.a(x) + self.table
        with torch.no_grad():
            share = hidden.softmax(-1)
        hidden = self.frozen(hidden) * weight + share
        if negate:
            hidden = -hidden
        hidden[:, 0] = 0
        return Answer(self.b(hidden), (hidden, None))


class Paths(nn.Module):
    """Stochastic depth, a branch on the mode, and ops that one mode alone runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.training:
            y = y * (torch.rand(y.size(0), 1, dtype=y.dtype) > 0.25) / 0.75
        x = x + y
        x = x + self.b(x) if self.training else x - self.b(x).relu()
        return self.c(x)


class Auxiliary(nn.Module):
    """A head in the middle that training alone has, and terms of the loss that go with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.aux = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 2))
        self.middle = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 3)
        self.post = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Answer | dict[str, Tensor]:
        x = self.first(x).relu()
        if self.training:
            aux = self.aux(x)
            penalty = aux.square().mean(1)
        for layer in self.middle:
            x = layer(x).tanh()
        y = self.last(x)
        if self.training:
            return Answer(y, (aux, penalty + y.sum(1)), "train")
        return {"answer": self.post(y), "twice": y, "again": y}


class Contrast(nn.Module):
    """Compares all rows of the batch with each other, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, object]:
        left, right = self.left(x), self.right(y)
        scores = left @ right.t()
        loss = F.cross_entropy(scores, torch.arange(len(x)))
        return {"embeddings": (left, right), "scores": scores, "loss": loss}


class Counted(nn.Module):
    """Begins by writing a buffer: a first stage may take nothing and hand nothing on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.layer(x)


class Cache:
    """What each layer remembers, as transformers' caches of keys and values keep it."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []
        self.filled: dict[int, bool] = {}
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None

    def update(self, k: int, value: Tensor) -> Tensor:
        """All of layer k's values, this one included."""
        self.dtype, self.device = value.dtype, value.device
        if k == len(self.layers):
            self.layers.append(value)
        else:
            self.layers[k] = torch.cat([self.layers[k], value], dim=1)
        self.filled[k] = True
        return self.layers[k]


class Cached(nn.Module):
    """Gives back a cache object, which it may be given too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, past: Cache | None = None) -> dict[str, object]:
        past = Cache() if past is None else past
        for k, layer in enumerate(self.layers):
            x = past.update(k, layer(x).tanh()).sum(1, keepdim=True) + x
        return {"x": x, "past": past}


class Waves(nn.Module):
    """Complex numbers go from layer to layer, and out; some are weights, some a buffer."""

    offsets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.turns = nn.Parameter(torch.randn(3))
        self.mix = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))
        self.register_buffer("offsets", torch.randn(3, dtype=torch.complex64))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        waves = torch.view_as_complex(self.first(x).view(-1, 3, 2))
        waves = waves * torch.polar(torch.ones_like(self.turns), self.turns)
        waves = (waves.conj() * waves.abs()) @ self.mix + self.offsets
        return self.last(torch.view_as_real(waves.resolve_conj()).flatten(1)), waves
