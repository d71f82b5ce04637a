"""Stock models of five libraries, small by their settings: real classes, real forward calls.

`ZOO` has them by name. A model's inputs are made for a batch size, its weights are random. The
libraries are imported when a model is built.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Inputs = tuple[Tensor, ...] | dict[str, Any]
WORDS, LENGTH = 100, 16  # of a text
CLASSES = 10


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the zoo.

    `library` is what must be installed. `dtype` is the precision to compare in: float32 where
    autocast would leave float64 alone, or where the model itself computes in float32 at times.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    dtype: str = "float64"


def images(size: int, batch: int) -> Inputs:
    return (torch.randn(batch, 3, size, size),)


def tokens(batch: int) -> Tensor:
    return torch.randint(3, WORDS, (batch, LENGTH))


def padding(batch: int) -> Tensor:
    """Rows of different lengths, filled up on the right."""
    lengths = LENGTH - torch.arange(batch) % 5
    return (torch.arange(LENGTH) < lengths[:, None]).long()


def text(batch: int) -> Inputs:
    return {"input_ids": tokens(batch), "attention_mask": padding(batch), "labels": tokens(batch)}


def bare_text(batch: int) -> Inputs:
    return {"input_ids": tokens(batch)}


def sentences(batch: int) -> Inputs:
    return {
        "input_ids": tokens(batch),
        "attention_mask": padding(batch),
        "labels": torch.randint(2, (batch,)),
    }


def pixels(size: int, batch: int) -> Inputs:
    return {"pixel_values": torch.randn(batch, 3, size, size)}


def labelled_pixels(size: int, batch: int) -> Inputs:
    return {**pixels(size, batch), "labels": torch.randint(2, (batch,))}


def text_and_pixels(size: int, batch: int) -> Inputs:
    return {"input_ids": tokens(batch), **pixels(size, batch)}


def declare_vision_ops() -> None:
    """torchvision's own operators, which builds for another torch lack and its import asks for."""
    global _vision_ops  # a Library undoes its definitions when it is collected
    _vision_ops = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _vision_ops.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")


def library(name: str) -> Any:
    if name in ("torchvision", "timm", "transformers", "diffusers"):  # each imports torchvision
        declare_vision_ops()
    return importlib.import_module(name)


def torchvision(name: str, size: int = 64, module: str = "models", **settings: Any) -> Entry:
    def build() -> nn.Module:
        library("torchvision")
        models = importlib.import_module(f"torchvision.{module}")
        return getattr(models, name)(num_classes=CLASSES, **settings)

    return Entry(name, "torchvision", build, functools.partial(images, size))


def timm(name: str, size: int = 64, **settings: Any) -> Entry:
    def build() -> nn.Module:
        return library("timm").create_model(name, num_classes=CLASSES, **settings)

    return Entry(name, "timm", build, functools.partial(images, size))


def transformers(
    class_name: str, inputs: Callable[[int], Inputs], dtype: str = "float64", **settings: Any
) -> Entry:
    def build() -> nn.Module:
        kind = getattr(library("transformers"), class_name)
        return kind(kind.config_class(**settings))

    return Entry(class_name, "transformers", build, inputs, dtype)


def changed(entry: Entry, how: str, change: Callable[[Any], None]) -> Entry:
    """The same model after `change`, which is named `how`."""

    def build() -> nn.Module:
        model = entry.build()
        change(model)
        return model

    return Entry(f"{entry.name}, {how}", entry.library, build, entry.inputs)


def every_layer(class_name: str, inputs: Callable[[int], Inputs]) -> Entry:
    """A model of speech that drops no layers at random, which is a branch that values decide."""
    settings = {**SPEECH, "layerdrop": 0.0, "apply_spec_augment": False}
    entry = transformers(class_name, inputs, **settings)
    return replace(entry, name=f"{class_name}, no layerdrop")


def recomputing(entry: Entry) -> Entry:
    return changed(entry, "checkpointing", lambda model: model.gradient_checkpointing_enable())


def mixture(class_name: str, inputs: Callable[[int], Inputs], **settings: Any) -> Entry:
    """Experts by `batched_mm`: the default `grouped_mm` knows no float64."""
    return changed(
        transformers(class_name, inputs, **settings),
        "batched_mm",
        lambda model: model.set_experts_implementation("batched_mm"),
    )


def diffusers(
    class_name: str,
    inputs: Callable[[int], Inputs],
    name: str = "",
    dtype: str = "float64",
    **settings: Any,
) -> Entry:
    def build() -> nn.Module:
        return getattr(library("diffusers"), class_name)(**settings)

    return Entry(name or class_name, "diffusers", build, inputs, dtype)


def own(
    build: Callable[[], nn.Module],
    inputs: Callable[[int], Inputs],
    name: str = "",
    dtype: str = "float64",
) -> Entry:
    return Entry(name or build.__name__, "torch", build, inputs, dtype)


class Tagger(nn.Module):
    """A recurrent network over a text, that returns its last state too."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.rnn = kind(16, 24, num_layers=2, dropout=0.1, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, words: Tensor) -> tuple[Tensor, Any]:
        hidden, state = self.rnn(self.embedding(words))
        return self.head(self.norm(hidden)), state


class Translator(nn.Module):
    """A GRU that reads, and one that writes with attention over what was read, word by word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.encoder = nn.GRU(16, 24, batch_first=True)
        self.decoder = nn.GRUCell(16 + 24, 24)
        self.head = nn.Linear(24, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, state = self.encoder(self.embedding(source))
        state = state[0]
        written = []
        for word in self.embedding(target).unbind(1)[:6]:
            weights = F.softmax(torch.bmm(read, state.unsqueeze(-1)).squeeze(-1), dim=-1)
            context = torch.bmm(weights.unsqueeze(1), read).squeeze(1)
            state = self.decoder(torch.cat([word, context], dim=-1), state)
            written.append(self.head(state))
        return torch.stack(written, dim=1)


class DLRM(nn.Module):
    """Naumov et al., arXiv 1906.00091: dense and categorical features, and their products."""

    def __init__(self, n_dense: int = 8, n_tables: int = 5, width: int = 16) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(n_dense, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU()
        )
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, width) for _ in range(n_tables))
        pairs = (n_tables + 1) * n_tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = [x, *(table(categories[:, k]) for k, table in enumerate(self.tables))]
        stacked = torch.stack(features, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        rows, columns = torch.tril_indices(len(features), len(features), -1)
        return torch.sigmoid(self.top(torch.cat([x, products[:, rows, columns]], dim=1)))


class Autocast(nn.Module):
    """A model whose forward runs in bfloat16 where that is safe."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.inner(x)
        return y.float()


class Recomputed(nn.Module):
    """Residual blocks that keep nothing for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class Experts(nn.Module):
    """A mixture of experts that sends each token to one of them, expert by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            (chosen,) = (choice == k).nonzero(as_tuple=True)
            y[chosen] = expert(x[chosen])
        return y * weight.unsqueeze(-1)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)


DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": WORDS,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
SPEECH = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (8, 8, 8),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
}
TOWERS = {
    "text_config": {
        **ENCODER,
        "num_hidden_layers": 2,
        "eos_token_id": WORDS - 1,
        "bos_token_id": 1,
    },
    "vision_config": {**VISION, "num_hidden_layers": 2},
}
TWO_SIDED = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
MIXTURE = {**DECODER, "num_hidden_layers": 2}


def sound(batch: int) -> Inputs:
    return {"input_values": torch.randn(batch, 800)}


def sound_and_label(batch: int) -> Inputs:
    return {**sound(batch), "labels": torch.randint(2, (batch,))}


def labelled_sound(batch: int) -> Inputs:
    return {**sound(batch), "labels": torch.randint(1, 32, (batch, 5))}


def spectrogram(batch: int) -> Inputs:
    return {"input_features": torch.randn(batch, 8, 64), "labels": tokens(batch)}


def latents(batch: int) -> Inputs:
    return {"sample": torch.randn(batch, 4, 16, 16), "timestep": torch.randint(1000, (batch,))}


def sdxl_inputs(batch: int) -> Inputs:
    return {
        **latents(batch),
        "encoder_hidden_states": torch.randn(batch, 7, 32),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(batch, 32),
            "time_ids": torch.randn(batch, 6),
        },
    }


def sd3_inputs(batch: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, 16, 16),
        "encoder_hidden_states": torch.randn(batch, 7, 32),
        "pooled_projections": torch.randn(batch, 16),
        "timestep": torch.randint(1000, (batch,)),
    }


def dit_inputs(batch: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, 8, 8),
        "timestep": torch.randint(1000, (batch,)),
        "class_labels": torch.randint(CLASSES, (batch,)),
    }


def pixart_inputs(batch: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, 8, 8),
        "encoder_hidden_states": torch.randn(batch, 7, 32),
        "timestep": torch.randint(1000, (batch,)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def flux_inputs(batch: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 16, 4),
        "encoder_hidden_states": torch.randn(batch, 8, 32),
        "pooled_projections": torch.randn(batch, 32),
        "timestep": torch.rand(batch),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(8, 3),
        "guidance": torch.rand(batch),
    }


def small_images(batch: int) -> Inputs:
    return {"sample": torch.randn(batch, 3, 32, 32)}


def sampled_images(batch: int) -> Inputs:
    return {"sample": torch.randn(batch, 3, 32, 32), "sample_posterior": True}


AUTOENCODER = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
    "norm_num_groups": 8,
    "latent_channels": 4,
}

_ENTRIES = [
    # torchvision: convolutional networks, then transformers
    torchvision("resnet18"),
    torchvision("DenseNet", growth_rate=8, block_config=(2, 3, 2), num_init_features=16),
    torchvision("inception_v3", 299, init_weights=False),
    torchvision("googlenet", init_weights=False),
    torchvision("mobilenet_v2"),
    torchvision("mobilenet_v3_small"),
    torchvision("mnasnet0_5"),
    torchvision("efficientnet_b0"),
    torchvision("regnet_y_400mf"),
    torchvision("shufflenet_v2_x0_5"),
    torchvision("vgg11_bn", 32),
    torchvision("squeezenet1_1"),
    torchvision(
        "VisionTransformer",
        image_size=64,
        patch_size=16,
        num_layers=4,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=64,
        dropout=0.1,
    ),
    torchvision(
        "SwinTransformer",
        32,
        patch_size=[2, 2],
        embed_dim=16,
        depths=[1, 1, 2],
        num_heads=[1, 2, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.1,
    ),
    torchvision(
        "MaxVit",
        input_size=(64, 64),
        stem_channels=16,
        partition_size=2,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.1,
    ),
    torchvision(
        "deeplabv3_mobilenet_v3_large",
        module="models.segmentation",
        weights_backbone=None,
        aux_loss=True,
    ),
    # timm
    timm("eca_nfnet_l0"),
    timm("resnest14d"),
    timm("ese_vovnet19b_dw"),
    timm("ghostnet_050"),
    timm("convnext_atto", drop_path_rate=0.1),
    timm("convnextv2_atto"),
    timm("mobilevit_xxs"),
    timm("vit_tiny_patch16_224", img_size=64, depth=4, drop_path_rate=0.1),
    timm("deit_tiny_distilled_patch16_224", img_size=64, depth=4, drop_path_rate=0.1),
    timm("vit_small_patch14_dinov2", 56, img_size=56, depth=4, embed_dim=48, num_heads=3),
    timm("beit_base_patch16_224", img_size=64, depth=4, embed_dim=48, num_heads=3),
    timm("eva02_tiny_patch14_224", 56, img_size=56, depth=4, embed_dim=48, num_heads=3),
    timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(1, 1, 2, 1)),
    timm("xcit_nano_12_p16_224", img_size=64, depth=4),
    timm("cait_xxs24_224", img_size=64, depth=3),
    timm("crossvit_tiny_240", 240),
    timm("levit_128s", 224),
    timm("poolformer_s12"),
    timm("mixer_s32_224", img_size=64),
    timm("gmlp_ti16_224", img_size=64),
    timm("resmlp_12_224", img_size=64),
    # transformers: BERT's family
    transformers("BertForMaskedLM", text, **ENCODER),
    transformers("BertForSequenceClassification", sentences, **ENCODER),
    transformers("RobertaForMaskedLM", text, **ENCODER),
    transformers(
        "DistilBertForSequenceClassification",
        sentences,
        dim=32,
        n_layers=4,
        n_heads=4,
        hidden_dim=64,
        vocab_size=WORDS,
    ),
    transformers("AlbertForMaskedLM", text, embedding_size=16, hidden_dropout_prob=0.1, **ENCODER),
    transformers("ElectraForPreTraining", text, embedding_size=16, **ENCODER),
    transformers(
        "DebertaV2ForMaskedLM",
        text,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        **ENCODER,
    ),
    transformers("DebertaForMaskedLM", text, **ENCODER),
    transformers("MPNetForMaskedLM", text, **{**ENCODER, "pad_token_id": 1}),
    transformers(
        "XLNetLMHeadModel", text, d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=WORDS
    ),
    transformers(
        "ModernBertForMaskedLM", text, **{**ENCODER, "cls_token_id": 1, "sep_token_id": 2}
    ),
    transformers(
        "LongformerForMaskedLM", text, attention_window=8, max_position_embeddings=64, **ENCODER
    ),
    transformers(
        "BigBirdForMaskedLM",
        text,
        attention_type="block_sparse",
        block_size=2,
        num_random_blocks=1,
        **ENCODER,
    ),
    transformers(
        "ReformerModelWithLMHead",
        bare_text,
        hidden_size=32,
        feed_forward_size=64,
        num_attention_heads=2,
        attention_head_size=16,
        vocab_size=WORDS,
        axial_pos_shape=(4, 4),
        axial_pos_embds_dim=(16, 16),
        attn_layers=["local", "lsh"],
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=4,
        num_hashes=1,
        is_decoder=True,
    ),
    # transformers: GPT's family
    transformers("GPT2LMHeadModel", text, n_embd=32, n_layer=4, n_head=4, vocab_size=WORDS),
    recomputing(
        transformers("GPT2LMHeadModel", text, n_embd=32, n_layer=4, n_head=4, vocab_size=WORDS)
    ),
    transformers(
        "GPTNeoForCausalLM",
        text,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        vocab_size=WORDS,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
    ),
    transformers("GPTNeoXForCausalLM", text, **ENCODER),
    transformers(
        "GPTJForCausalLM", text, n_embd=32, n_layer=4, n_head=4, rotary_dim=4, vocab_size=WORDS
    ),
    transformers(
        "OPTForCausalLM",
        text,
        ffn_dim=64,
        word_embed_proj_dim=32,
        **{k: v for k, v in ENCODER.items() if k != "pad_token_id"},
    ),
    transformers(
        "BloomForCausalLM",
        text,
        hidden_size=32,
        n_layer=4,
        n_head=4,
        vocab_size=WORDS,
        hidden_dropout=0.1,
    ),
    transformers("FalconForCausalLM", text, **ENCODER),
    transformers(
        "MptForCausalLM", text, d_model=32, n_heads=4, n_layers=4, vocab_size=WORDS, max_seq_len=32
    ),
    transformers("LlamaForCausalLM", text, attention_dropout=0.1, **DECODER),
    recomputing(transformers("LlamaForCausalLM", text, **DECODER)),
    transformers("MistralForCausalLM", text, sliding_window=8, **DECODER),
    transformers("Qwen2ForCausalLM", text, **DECODER),
    transformers("Qwen3ForCausalLM", text, head_dim=8, **DECODER),
    transformers("GemmaForCausalLM", text, head_dim=8, **DECODER),
    transformers("Gemma2ForCausalLM", text, head_dim=8, sliding_window=8, **DECODER),
    transformers("Gemma3ForCausalLM", text, "float32", head_dim=8, sliding_window=8, **DECODER),
    transformers("PhiForCausalLM", text, **DECODER),
    transformers("Phi3ForCausalLM", text, **DECODER),
    transformers("Olmo2ForCausalLM", text, **DECODER),
    transformers("StableLmForCausalLM", text, **DECODER),
    transformers("CohereForCausalLM", text, **DECODER),
    transformers("GraniteForCausalLM", text, **DECODER),
    # transformers: state spaces, mixtures of experts
    transformers(
        "MambaForCausalLM",
        bare_text,
        hidden_size=32,
        num_hidden_layers=4,
        vocab_size=WORDS,
        state_size=4,
    ),
    transformers(
        "Mamba2ForCausalLM",
        bare_text,
        hidden_size=32,
        num_hidden_layers=2,
        vocab_size=WORDS,
        state_size=4,
        head_dim=8,
        num_heads=8,
        n_groups=1,
        chunk_size=8,
    ),
    transformers("MixtralForCausalLM", text, "float32", num_local_experts=4, **MIXTURE),
    mixture("MixtralForCausalLM", text, num_local_experts=4, **MIXTURE),
    mixture(
        "Qwen2MoeForCausalLM",
        text,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=32,
        **MIXTURE,
    ),
    mixture(
        "Qwen3MoeForCausalLM",
        text,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        head_dim=8,
        **MIXTURE,
    ),
    mixture("OlmoeForCausalLM", text, num_experts=4, num_experts_per_tok=2, **MIXTURE),
    mixture(
        "DeepseekV3ForCausalLM",
        text,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        **{**MIXTURE, "num_key_value_heads": 4},
    ),
    mixture(
        "GptOssForCausalLM",
        text,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=8,
        **MIXTURE,
    ),
    transformers(
        "SwitchTransformersForConditionalGeneration",
        lambda batch: {"input_ids": tokens(batch), "labels": tokens(batch)},
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=4,
        vocab_size=WORDS,
        decoder_start_token_id=0,
    ),
    # transformers: encoder and decoder
    transformers(
        "T5ForConditionalGeneration",
        text,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=WORDS,
        decoder_start_token_id=0,
    ),
    transformers("BartForConditionalGeneration", text, max_position_embeddings=64, **TWO_SIDED),
    transformers("MBartForConditionalGeneration", text, max_position_embeddings=64, **TWO_SIDED),
    transformers("PegasusForConditionalGeneration", text, max_position_embeddings=64, **TWO_SIDED),
    transformers(
        "WhisperForConditionalGeneration",
        spectrogram,
        max_source_positions=32,
        max_target_positions=64,
        num_mel_bins=8,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        **TWO_SIDED,
    ),
    # transformers: speech
    transformers("Wav2Vec2ForCTC", sound, apply_spec_augment=False, **SPEECH),
    transformers("Wav2Vec2ForSequenceClassification", sound_and_label, **SPEECH),
    transformers("HubertForCTC", labelled_sound, **SPEECH),
    every_layer("Wav2Vec2ForCTC", sound),
    every_layer("Wav2Vec2ForSequenceClassification", sound_and_label),
    every_layer("HubertForCTC", sound),
    every_layer("WavLMForCTC", sound),
    every_layer("Data2VecAudioForCTC", sound),
    # transformers: vision
    transformers("ViTForImageClassification", functools.partial(labelled_pixels, 32), **VISION),
    transformers("DeiTForImageClassification", functools.partial(labelled_pixels, 32), **VISION),
    transformers("BeitForImageClassification", functools.partial(labelled_pixels, 32), **VISION),
    transformers(
        "Dinov2ForImageClassification",
        functools.partial(labelled_pixels, 32),
        **{k: v for k, v in VISION.items() if k != "intermediate_size"},
    ),
    transformers(
        "ViTMAEForPreTraining",
        functools.partial(pixels, 32),
        decoder_hidden_size=16,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
        **VISION,
    ),
    transformers(
        "SwinForImageClassification",
        functools.partial(labelled_pixels, 32),
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[1, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    transformers(
        "ConvNextForImageClassification",
        functools.partial(labelled_pixels, 32),
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 2, 1],
        drop_path_rate=0.1,
    ),
    transformers(
        "SegformerForSemanticSegmentation",
        functools.partial(pixels, 64),
        hidden_sizes=[16, 32, 32, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=32,
    ),
    transformers("CLIPModel", functools.partial(text_and_pixels, 32), projection_dim=16, **TOWERS),
    transformers("SiglipModel", functools.partial(text_and_pixels, 32), **TOWERS),
    # diffusers
    diffusers(
        "UNet2DConditionModel",
        sdxl_inputs,
        "UNet2DConditionModel as in SDXL",
        sample_size=16,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=(2, 4, 4),
        transformer_layers_per_block=(1, 1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=32 + 6 * 8,
        norm_num_groups=8,
    ),
    diffusers(
        "UNet2DModel",
        latents,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    ),
    diffusers(
        "SD3Transformer2DModel",
        sd3_inputs,
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
    ),
    diffusers(
        "DiTTransformer2DModel",
        dit_inputs,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        sample_size=8,
        num_embeds_ada_norm=CLASSES,
    ),
    diffusers(
        "PixArtTransformer2DModel",
        pixart_inputs,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        sample_size=8,
        cross_attention_dim=32,
        caption_channels=32,
        use_additional_conditions=False,
    ),
    diffusers(
        "FluxTransformer2DModel",
        flux_inputs,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    ),
    diffusers("AutoencoderKL", small_images, **AUTOENCODER),
    diffusers("AutoencoderKL", sampled_images, "AutoencoderKL, sampling", **AUTOENCODER),
    diffusers(
        "VQModel",
        small_images,
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        norm_num_groups=8,
        num_vq_embeddings=32,
    ),
    diffusers(
        "AutoencoderTiny",
        small_images,
        dtype="float32",
        encoder_block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ),
    # torch alone
    own(lambda: Tagger(nn.LSTM), lambda b: (tokens(b),), "LSTM"),
    own(lambda: Tagger(nn.GRU), lambda b: (tokens(b),), "GRU"),
    own(Translator, lambda b: (tokens(b), tokens(b))),
    own(DLRM, lambda b: (torch.randn(b, 8), torch.randint(50, (b, 5, 3)))),
    own(
        lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True),
        lambda b: {"src": torch.randn(b, 10, 32), "tgt": torch.randn(b, 8, 32)},
        "nn.Transformer",
    ),
    own(
        lambda: nn.TransformerEncoder(encoder_layer(), 3),
        lambda b: {
            "src": torch.randn(b, 10, 32),
            "mask": nn.Transformer.generate_square_subsequent_mask(10),
            "is_causal": True,
        },
        "nn.TransformerEncoder",
    ),
    own(lambda: Autocast(convolutions()), functools.partial(images, 16), "autocast", "float32"),
    own(Recomputed, lambda b: (torch.randn(b, 16),)),
    own(Experts, lambda b: (torch.randn(b, 16),)),
]
ZOO = {entry.name: entry for entry in _ENTRIES}
