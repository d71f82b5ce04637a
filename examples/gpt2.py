"""GPT-2 of the transformers library, unchanged, with random weights. Needs `fxpipe[examples]`.

    fxpipe compile examples/gpt2.py --devices 2 -o build/gpt2

The token embedding is also the weight of the last layer, so the first and the last stage share it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

LAYERS = 12
HIDDEN = 256
HEADS = 8
SEQUENCE = 64
VOCABULARY = 1000


def build() -> nn.Module:
    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=HIDDEN,
        n_head=HEADS,
        n_positions=SEQUENCE,
        vocab_size=VOCABULARY,
        bos_token_id=VOCABULARY - 1,
        eos_token_id=VOCABULARY - 1,
    )
    return GPT2LMHeadModel(config)


def tokens(batch: int) -> Tensor:
    """A made-up language: each sequence counts up by its own step."""
    start = torch.arange(batch)[:, None]
    step = 1 + torch.arange(batch)[:, None] % 7
    return (start + step * torch.arange(SEQUENCE)) % VOCABULARY


def inputs(batch: int) -> dict[str, Any]:
    return {"input_ids": tokens(batch), "use_cache": False}


def targets(batch: int) -> Tensor:
    return tokens(batch)


def loss(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of each token given those before it."""
    logits = output.logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
