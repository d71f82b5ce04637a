"""Compiles small models on made-up costs, the same on every machine and in every run."""

from fxpipe.capture import capture
from fxpipe.compiler import compile
from fxpipe.ir import Link, Network, OpCost, Profile
from fxpipe.target import Target
from fxpipe.verify import verify


def flat_profile(captured, microbatches):
    """Each op takes 1 ms forward and 2 ms backward and keeps its own result."""
    rows = -(-captured.batch // microbatches)
    return Profile(
        costs={
            name: OpCost(1.0, 2.0, ((name, 8),) if name in captured.specs else ())
            for name in captured.ops
        },
        network=Network(Link(latency_ms=0.01, bytes_per_ms=1e6)),
        device="cpu",
        capacity_bytes=2**30,
        batch=rows,
        fingerprint=captured.fingerprint,
        origin="made up",
    )


def compile_flat(model, args=(), kwargs=None, *, devices, microbatches, **options):
    """`fxpipe.compile` with a flat profile."""
    profile = flat_profile(capture(model, args, kwargs or {}), microbatches)
    return compile(
        model, args, kwargs, devices=devices, microbatches=microbatches, profile=profile, **options
    )


def verified(kind, make, tmp_path, *, devices="cpu*2", checkpoint="never"):
    """The package of `kind()`, which computes what the model does, in train and eval mode.

    `make` gives keyword inputs for a number of rows. Another number than traced is compared.
    """
    package = compile_flat(
        kind(), kwargs=make(8), devices=devices, microbatches=4, checkpoint=checkpoint
    )
    target = Target(kind.__name__, __file__, str(tmp_path), kind, make)
    result = verify(package.write(tmp_path / "out"), target, batch=10)
    assert result.equal, result
    assert [d.group for d in result.differences][-1] == "eval(): outputs"
    return package
