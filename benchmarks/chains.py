"""Bare chains to plan: costs of real models on an A100 with 40 GB, and two very uneven ones.

python benchmarks/chains.py FOLDER           write all as FOLDER/NAME.json
python benchmarks/chains.py FOLDER NAME ...  write these

A file is what `fxpipe plan --chain` takes. Models are built without memory and priced by
`analytic:a100`. Needs transformers, timm, torchvision and diffusers.
"""

import argparse
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from zoo import declare_vision_ops

import fxpipe
from fxpipe.capture import capture, flat_inputs
from fxpipe.costs.topology import WIRES
from fxpipe.ir import Chain
from fxpipe.passes.analytic import analytic
from fxpipe.passes.linearize import linearize

# 40 GB, of which a tenth is CUDA's own and what lies between the blocks of the allocator.
CAPACITY_BYTES = round(0.9 * 40e9)
ADAM = 3.0  # a gradient and two states, in the parameters' dtype
LINK = WIRES["nvlink3"].link
# A value that is read this few blocks later is not sent past a stage between: none is so short.
NEAR = 12
Model = tuple[nn.Module, dict[str, Any]]


def gpt2_xl(batch: int) -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    # Attention with dropout is priced as torch computes it on a CPU: with all weights in memory.
    config = GPT2Config(n_embd=1600, n_layer=48, n_head=25, attn_pdrop=0, use_cache=False)
    inputs = {"input_ids": torch.randint(config.vocab_size, (batch, 1024))}
    return GPT2LMHeadModel(config).bfloat16(), inputs


def vit_g_14(batch: int) -> Model:
    from timm import create_model

    inputs = {"x": torch.randn(batch, 3, 224, 224, dtype=torch.bfloat16)}
    return create_model("vit_giant_patch14_224").bfloat16(), inputs


def llama_2_7b(batch: int) -> Model:
    from big import llama_2_7b as target

    return target.build().bfloat16(), {"input_ids": torch.randint(32000, (batch, 4096))}


def sdxl_unet(batch: int) -> Model:
    from big import sdxl_unet as target

    inputs = tree_map_only(torch.Tensor, _in_bfloat16, target.inputs(batch))
    return target.build().bfloat16(), inputs


def _in_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def resnet_101(batch: int) -> Model:
    from torchvision.models import resnet101

    return resnet101(), {"x": torch.randn(batch, 3, 224, 224)}


# Rows of a micro-batch, and how many blocks there may be.
MODELS: dict[str, tuple[Callable[[int], Model], int, int]] = {
    "resnet_101": (resnet_101, 32, 700),
    "vit_g_14": (vit_g_14, 16, 700),
    "gpt2_xl": (gpt2_xl, 4, 700),
    "llama_2_7b": (llama_2_7b, 1, 700),
    "sdxl_unet": (sdxl_unet, 1, 1600),
}


def of_model(name: str) -> dict[str, Any]:
    """The model's chain, from its graph."""
    make, rows, most = MODELS[name]
    with fxpipe.without_memory():
        model, inputs = make(2 * rows)
    captured = capture(model, (), inputs)
    given = flat_inputs(model, (), inputs)
    profile = analytic(captured, model, given, n_microbatches=2, device="analytic:a100")
    return bare(linearize(captured, profile), most)


def bare(chain: Chain, most: int) -> dict[str, Any]:
    """`chain` as a file's content, in at most `most` blocks.

    Blocks are joined where no stage may end, and until each takes as long as makes them that few;
    what takes no time (views) is never one by itself. What several of them keep counts at the
    first. A value crosses each boundary up to its next reader if that is near, as does a residual;
    a reader that is far from the one before gets it by a skip.
    """
    ends = _ends(chain, most)
    seen: set[str] = set()

    def new(stored: Iterator[tuple[str, int]]) -> int:
        found = {name: size for name, size in stored if name not in seen}
        seen.update(found)
        return sum(found.values())

    blocks: list[dict[str, Any]] = []
    for begin, end in pairwise((0, *ends)):
        within = chain.blocks[begin:end]
        weight_ms = sum(block.weight_gradient_ms for block in within)
        blocks.append(
            {
                "forward_ms": sum(block.forward_ms for block in within),
                "input_gradient_ms": sum(block.backward_ms for block in within) - weight_ms,
                "weight_gradient_ms": weight_ms,
                "saved_bytes": new(one for block in within for one in block.saved),
                "parameter_bytes": new(one for block in within for one in block.parameters),
                "output_bytes": 0,
            }
        )
    skips: dict[tuple[int, int], int] = {}
    for value in chain.values:
        if value.producer < 0:
            continue
        at = bisect_right(ends, value.producer)
        readers = {bisect_right(ends, k) for k in value.consumers if k < len(chain.blocks)} - {at}
        for reader in sorted(readers):
            if reader - at <= NEAR:
                for k in range(at, reader):
                    blocks[k]["output_bytes"] += value.bytes
            else:
                skips[at, reader] = skips.get((at, reader), 0) + value.bytes
            at = reader
    return _file(blocks, skips)


def _ends(chain: Chain, most: int) -> list[int]:
    """How many of the chain's blocks lie before the end of each joined one."""
    times = [block.forward_ms + block.backward_ms for block in chain.blocks]
    least = 1e-4 * sum(times) / most
    while len(ends := _closed(times, chain.cuttable, least)) > most:
        least *= 1.1
    return ends


def _closed(times: list[float], cuttable: Sequence[bool], least: float) -> list[int]:
    taken, ends = 0.0, []
    for k, ms in enumerate(times[:-1]):
        taken += ms
        if cuttable[k] and taken >= least:
            ends.append(k + 1)
            taken = 0.0
    return [*ends, len(times)]


def lognormal() -> dict[str, Any]:
    """96 blocks whose times and sizes spread over two orders of magnitude, and three skips."""
    draw = random.Random(0)
    blocks = []
    for _ in range(96):
        forward_ms = draw.lognormvariate(0, 1)
        blocks.append(
            {
                "forward_ms": forward_ms,
                "input_gradient_ms": forward_ms * draw.uniform(0.7, 1.3),
                "weight_gradient_ms": forward_ms * draw.uniform(0, 1.3),
                "saved_bytes": round(draw.lognormvariate(17, 1)),
                "parameter_bytes": round(draw.lognormvariate(17, 1)),
                "output_bytes": round(draw.lognormvariate(16, 1)),
            }
        )
    return _file(blocks, {(5, 90): 2**24, (20, 60): 2**25, (30, 75): 2**24})


def heavy() -> dict[str, Any]:
    """A U of 63 blocks; the first takes a tenth of the time, a middle one as much and no weights.

    Every block of the way down is read by its like on the way up.
    """
    draw = random.Random(1)
    blocks = []
    for k in range(63):
        depth = min(k, 62 - k)
        forward_ms = {0: 8.0, 40: 8.0}.get(k, draw.uniform(0.5, 1.5))
        blocks.append(
            {
                "forward_ms": forward_ms,
                "input_gradient_ms": forward_ms,
                "weight_gradient_ms": 0.0 if k == 40 else forward_ms,
                "saved_bytes": 2**28 >> depth // 8,
                "parameter_bytes": 2**22 << depth // 8,
                "output_bytes": 2**25 >> depth // 8,
            }
        )
    return _file(blocks, {(k, 62 - k): 2**25 >> k // 8 for k in range(0, 24, 4)})


SYNTHETIC = {"lognormal": lognormal, "heavy": heavy}


def _file(blocks: list[dict[str, Any]], skips: dict[tuple[int, int], int]) -> dict[str, Any]:
    return {
        "blocks": [
            {key: round(of, 6) if isinstance(of, float) else of for key, of in block.items()}
            for block in blocks
        ],
        "skips": [{"from": a, "to": b, "bytes": n} for (a, b), n in sorted(skips.items())],
        "capacity_bytes": CAPACITY_BYTES,
        "optimizer_bytes_per_parameter_byte": ADAM,
        "latency_ms": LINK.latency_ms,
        "bandwidth_gb_s": LINK.bytes_per_ms / 1e6,
    }


def chain(name: str) -> dict[str, Any]:
    """The content of the file of this name."""
    return SYNTHETIC[name]() if name in SYNTHETIC else of_model(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=", ".join([*SYNTHETIC, *MODELS]))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    declare_vision_ops()
    for name in options.names or [*SYNTHETIC, *MODELS]:
        made = chain(name)
        blocks = made["blocks"]
        (options.folder / f"{name}.json").write_text(json.dumps(made))
        totals = [f"{key} {sum(block[key] for block in blocks):.4g}" for key in blocks[0]]
        print(f"{name}: {len(blocks)} blocks, {len(made['skips'])} skips, {', '.join(totals)}")


if __name__ == "__main__":
    main()
