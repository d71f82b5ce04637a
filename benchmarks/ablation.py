"""What each of torchgpipe's components is worth: its table 1 (arXiv 2004.09910), on `pipe(x)`.

    python benchmarks/ablation.py                     U-Net (5, 64) on 4 GPUs, else a small one
    python benchmarks/ablation.py --devices cuda:0/4  on one GPU cut into four
    python benchmarks/ablation.py --devices cpu*4 --blocks 2 --channels 16 --image 64 --batch 16

Rows add a component each: dependency (fork and join put backward in order), streams (copies beside
the computation), portals (skips go straight to their stage). The last leaves out checkpoint. On CPU
lanes nothing is copied, and one thread runs backward: there only checkpoint makes a difference, and
memory is that of forward.
"""

import argparse
import tempfile

import torch
from common import example, machine, peak_bytes, seconds, size
from markdown_table import head, line
from torch import Tensor

import fxpipe
from fxpipe.runtime.stream import place

M = 8
ROWS = {
    "checkpoint alone": ("dependency", "streams", "portals"),
    "+ dependency": ("streams", "portals"),
    "+ streams": ("portals",),
    "+ portals": (),
    "- checkpoint": ("checkpoint",),
}


def main() -> None:
    on_gpus = torch.cuda.device_count() >= 4
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    devices = "cuda:0,cuda:1,cuda:2,cuda:3" if on_gpus else "cpu*4"
    parser.add_argument("--devices", default=devices, help="four of them")
    parser.add_argument("--blocks", type=int, default=5 if on_gpus else 2)
    parser.add_argument("--channels", type=int, default=64 if on_gpus else 8)
    parser.add_argument("--image", type=int, default=192 if on_gpus else 64)
    parser.add_argument("--batch", type=int, default=128 if on_gpus else 16)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if not on_gpus:
        print(f"{torch.cuda.device_count()} GPUs here, the paper has four: see --devices")
    torch.set_num_threads(1)
    unet = example("unet")
    with fxpipe.without_memory():  # the whole would take long to compare on the CPU
        model = unet.UNet(n_blocks=options.blocks, channels=options.channels)
    x = torch.rand(options.batch, 3, options.image, options.image)
    print(
        f"{machine()}\nU-Net ({options.blocks}, {options.channels}), {options.image} x "
        f"{options.image}, batch {options.batch}, m={M}, except_last, on {options.devices}\n"
    )
    print(head(["components", "samples/s", "of the first", "memory of all"]))
    with tempfile.TemporaryDirectory() as folder:
        package = fxpipe.compile(
            model,
            (x,),
            devices=options.devices,
            microbatches=M,
            checkpoint="except_last",
            profile="analytic:cpu" if options.devices.startswith("cpu") else "analytic:h100",
        )
        out = package.write(f"{folder}/out")
        first = None
        for name, without in ROWS.items():
            pipe = fxpipe.load(out, devices=options.devices, without=without)
            first_place, last_place = place(pipe.devices[0]), place(pipe.devices[-1])
            target = torch.ones(options.batch, 1, *x.shape[2:], device=last_place)
            rate, held = measure(pipe, x.to(first_place), target, options.repeats)
            first = first or rate
            print(line([name, f"{rate:.1f}", f"{rate / first:.2f}", size(held)]))


def measure(pipe: fxpipe.Pipeline, x: Tensor, target: Tensor, repeats: int) -> tuple[float, int]:
    """Samples per second of training steps, and peak bytes of all devices."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(pipe(x), target).backward()
        optimizer.step()

    return len(x) / seconds(step, repeats), sum(peak_bytes(pipe, step))


if __name__ == "__main__":
    main()
