"""Trains a small GPT over several processes; started again, it goes on from its last checkpoint.

fxpipe compile examples/train_distributed.py --devices 2 --weights -o build/gpt
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_distributed.py build/gpt

On two hosts that share a file system, on each of them (examples/train_distributed.slurm does this):

torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d \\
    --rdzv-endpoint FIRST_HOST:29400 examples/train_distributed.py build/gpt

Twice as many processes train two replicas, each on batches of its own, with `--dp 2`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe

LAYERS = 8
WIDTH = 128
HEADS = 4
CONTEXT = 64

WORDS = (
    *("the", "a", "one", "every"),
    *("small", "old", "red", "quiet"),
    *("fox", "clerk", "river", "engine"),
    *("sees", "finds", "follows", "forgets"),
)
LETTERS = " .abcdefghijklmnopqrstuvwxyz"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.head.weight = self.letters.weight  # the first stage and the last share it
        nn.init.normal_(self.letters.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text) + self.places[: text.size(1)]
        return self.head(self.norm(self.blocks(x)))


def text(rows: int, seed: int) -> Tensor:
    """Sentences of a made-up language, as the numbers of their letters."""
    generator = torch.Generator().manual_seed(seed)
    written = ""
    while len(written) < rows * CONTEXT:
        kinds = torch.randint(0, 4, (5,), generator=generator).tolist()
        words = [WORDS[4 * place + k] for place, k in zip((0, 1, 2, 3, 2), kinds, strict=True)]
        written += " ".join(words) + ". "
    letters = [LETTERS.index(letter) for letter in written[: rows * CONTEXT]]
    return torch.tensor(letters).view(rows, CONTEXT)


def build() -> nn.Module:
    torch.manual_seed(0)
    return GPT()


def inputs(batch: int) -> tuple[Tensor]:
    return (text(batch, 0),)


def targets(batch: int) -> Tensor:
    return text(batch, 0)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of each letter given those before it."""
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", help="the folder that `fxpipe compile -o` wrote")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="rows of a step, in each replica")
    parser.add_argument("--dp", type=int, default=1, help="replicas of the pipeline")
    parser.add_argument("--save-every", type=int, default=20, help="steps, or 0: no checkpoints")
    parser.add_argument("--folder", default="run/gpt", help="where all processes write to")
    options = parser.parse_args()
    last = f"{options.folder}/last"

    pipe = fxpipe.load(options.package, distributed=True, dp=options.dp)
    replica = pipe.mesh.get_local_rank("dp")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    begin = 0
    if fxpipe.checkpoint.exists(last):
        begin = fxpipe.checkpoint.load(last, pipe, optimizer)["step"]
    for step in range(begin, options.steps):
        # What is drawn depends on the step alone: after a restart it is the same again.
        letters = text(options.batch, seed=step * options.dp + replica)
        optimizer.zero_grad()
        value = pipe.step(letters, target=letters, loss_fn=loss)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step:3}  loss {value.item():.4f}", flush=True)
        if options.save_every and (step + 1) % options.save_every == 0:
            fxpipe.checkpoint.save(last, pipe, optimizer, {"step": step + 1})
    pipe.save_weights(f"{options.folder}/model")


if __name__ == "__main__":
    main()
