"""Compiles small models on made-up costs, the same on every machine and in every run."""

from dataclasses import replace
from functools import lru_cache
from unittest.mock import patch

from fxpipe import compiler
from fxpipe.capture import capture
from fxpipe.codegen.emit import emit
from fxpipe.compiler import compile
from fxpipe.ir import Link, Network, OpCost, Profile
from fxpipe.passes.checkpoints import with_segments
from fxpipe.passes.portals import wire
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


def compile_flat(model, args=(), kwargs=None, *, devices, microbatches, captured=None, **options):
    """`fxpipe.compile` with a flat profile; both of one capture, which may be given."""
    captured = captured or capture(model, args, kwargs or {})
    profile = flat_profile(captured, microbatches)
    with patch.object(compiler, "capture_model", lambda *_: captured):
        return compile(
            model,
            args,
            kwargs,
            devices=devices,
            microbatches=microbatches,
            profile=profile,
            **options,
        )


def recomputing(package, segments):
    """The package anew, with these segments of each stage: runs of the chain's blocks."""
    return _anew(package, with_segments(package.plan, package.chain, segments))


def cut_everywhere(package):
    """A package of two stages anew, cut at each place where it may be."""
    for cut in range(1, len(package.chain.blocks)):
        yield _anew(package, replace(package.plan, cuts=(cut,)))


def _anew(package, plan):
    wiring = wire(package.capture, package.chain, plan)
    manifest, files = emit(
        package.capture,
        package.profile,
        plan,
        wiring,
        devices=package.manifest.devices,
        capacity_bytes=(package.profile.capacity_bytes,) * len(package.manifest.devices),
    )
    return replace(package, manifest=manifest, plan=plan, wiring=wiring, emitted=files)


def blocks_of(package, *modules):
    """The run of the chain's blocks that are of these modules."""
    prefixes = tuple(f"{module}." for module in modules)
    found = [
        k
        for k, block in enumerate(package.chain.blocks)
        if all(f"{package.capture.ops[op].module}.".startswith(prefixes) for op in block.ops)
    ]
    assert found == list(range(found[0], found[-1] + 1))
    return found[0], found[-1] + 1


@lru_cache(maxsize=1)
def _captured(kind, make):
    """Once for all modes of recomputation, which tests ask for one after the other."""
    return capture(kind(), (), make(8))


def verified(kind, make, tmp_path, *, devices="cpu*2", checkpoint="never"):
    """The package of `kind()`, which computes what the model does, in train and eval mode.

    `make` gives keyword inputs for a number of rows. Another number than traced is compared.
    """
    package = compile_flat(
        kind(),
        kwargs=make(8),
        devices=devices,
        microbatches=4,
        checkpoint=checkpoint,
        captured=_captured(kind, make),
    )
    target = Target(kind.__name__, __file__, str(tmp_path), kind, make)
    result = verify(package.write(tmp_path / "out"), target, batch=10)
    assert result.equal, result
    assert [d.group for d in result.differences][-1] == "eval(): outputs"
    return package


def compile_analytic(model, x, loss_fn, *, devices, microbatches=4, **options):
    """`fxpipe.compile` of a model that is trained to give its input, by costs worked out."""
    return compile(
        model,
        (x,),
        devices=["cpu"] * devices,
        microbatches=microbatches,
        profile="analytic:cpu",
        target=x,
        loss_fn=loss_fn,
        **options,
    )
