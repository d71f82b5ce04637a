"""The U-Net of Stable Diffusion XL 1.0, for images of 1024 by 1024."""

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn


def build() -> nn.Module:
    return UNet2DConditionModel(
        sample_size=128,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(320, 640, 1280),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def inputs(batch: int) -> dict[str, object]:
    return {
        "sample": torch.randn(batch, 4, 128, 128),
        "timestep": torch.randint(1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, 77, 2048),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(batch, 1280),
            "time_ids": torch.randn(batch, 6),
        },
    }


def targets(batch: int) -> Tensor:
    return torch.randn(batch, 4, 128, 128)
