"""Mixtral-8x7B, whose size is that of a MixtralConfig without arguments, on 512 tokens.

In a loop over experts, the path depends on which tokens go where; grouped, all are one op, which
torch has for bfloat16.
"""

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

SEQUENCE = 512


def build() -> nn.Module:
    config = MixtralConfig(use_cache=False, experts_implementation="grouped_mm")
    return MixtralForCausalLM(config).bfloat16()


def inputs(batch: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(32000, (batch, SEQUENCE))}
