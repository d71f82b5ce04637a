"""Trains a compiled package, then shows that it computes what the plain model does.

fxpipe compile examples/unet.py --devices 2 -o build/unet
python examples/train.py build/unet examples/unet.py
"""

import argparse
import importlib.util
import subprocess
import sys

import torch

import fxpipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", help="the folder that `fxpipe compile -o` wrote")
    parser.add_argument("model", help="the model file it was compiled from")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()

    spec = importlib.util.spec_from_file_location("model", options.model)
    model_file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model_file)

    torch.manual_seed(0)
    pipe = fxpipe.load(options.package)
    pipe.load_state_dict(model_file.build().state_dict())
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)

    inputs = model_file.inputs(options.batch)
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    target = model_file.targets(options.batch)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = pipe.step(*args, target=target, loss_fn=model_file.loss, **kwargs)
        optimizer.step()
        print(f"step {step:2}  loss {loss.item():.4f}")

    command = [sys.executable, "-m", "fxpipe", "verify", options.package, options.model]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
