"""Llama-2-7B, whose size is that of a LlamaConfig without arguments, on 512 tokens."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SEQUENCE = 512


def build() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(use_cache=False))


def inputs(batch: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(32000, (batch, SEQUENCE))}
