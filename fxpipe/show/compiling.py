"""What `fxpipe compile` says on its way: the devices, what each pass made, what it had to leave."""

from collections.abc import Sequence

from fxpipe.package import Package
from fxpipe.runtime.manifest import PartSpec
from fxpipe.show.texts import checked_text, devices_text, ms_text, plural


def choice_text(asked: str, devices: Sequence[str], n_cuda: int) -> str:
    """Which devices a `--devices` text came to, and why."""
    text = f"devices: {devices_text(devices)}"
    if set(devices) == {"cpu"} and asked.strip().isdigit():
        return f"{text}, since this machine has {plural(n_cuda, 'CUDA device')}"
    return text


def passes_text(package: Package) -> str:
    """One line for each pass: what it made."""
    capture, profile, chain, plan = package.capture, package.profile, package.chain, package.plan
    ports = [port for stage in package.manifest.stages for port in stage.inputs]
    portals = sum(port.portal for port in ports)
    cuts = ", ".join(map(str, plan.cuts)) or "none"
    bound = "" if plan.bound_ms is None else f", bound {ms_text(plan.bound_ms)}"
    lines = {
        "capture": f"{len(capture.ops)} ops, {len(capture.state)} tensors of state, "
        f"{checked_text(capture.checked)}",
        "profile": f"{len(profile.costs)} ops {profile.origin} on {profile.device}, "
        f"{profile.batch} rows",
        "linearize": f"{len(chain.blocks)} blocks, {sum(chain.cuttable)} places to cut, "
        f"{len(chain.values)} values between blocks",
        "partition": f"cuts after blocks {cuts} by {plan.solver}: step "
        f"{ms_text(plan.estimate.step_ms)}{bound}",
        "portals": f"{sum(port.source is not None for port in ports)} values cross, "
        f"{portals} by portal",
        "emit": f"{len(package.files)} files, "
        f"{sum(text.count(chr(10)) for text in package.files.values())} lines",
    }
    return "\n".join(f"{name:<12}{line}" for name, line in lines.items())


def part_text(part: PartSpec) -> str:
    """Which part of a model the package is of, and why it is not the whole."""
    first, last = part.modules[0], part.modules[-1]
    taken = first if first == last else f"{first} to {last}"
    return (
        f"took {taken}, {part.share:.0%} of the parameters: {part.broken_by}\n"
        "the rest runs as it is: model = fxpipe.splice(model, fxpipe.load(...))"
    )
