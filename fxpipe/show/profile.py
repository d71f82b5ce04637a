"""What `fxpipe profile` prints: the costs in sum, the dearest ops, and the links."""

import math
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from fxpipe.ir import Link, Profile
from fxpipe.show.table import new_table, spaced
from fxpipe.show.texts import bytes_text, ms_text, plural

_DEAREST = 8


def profile_json(profile: Profile) -> dict[str, Any]:
    """The facts of `profile_table`. Times and bytes are of one micro-batch."""
    costs = profile.costs.values()
    links: list[tuple[tuple[int, ...], Link]] = [((), profile.network.link)]
    links += profile.network.pairs.items()
    return {
        "device": profile.device,
        "origin": profile.origin,
        "rows": profile.batch,
        "ops": len(profile.costs),
        "forward_ms": sum(cost.forward_ms for cost in costs),
        "backward_ms": sum(cost.backward_ms for cost in costs),
        "weight_gradient_ms": sum(cost.weight_gradient_ms for cost in costs),
        "saved_bytes": sum({k: size for cost in costs for k, size in cost.saved}.values()),
        "loss_ms": profile.loss.ms if profile.loss else None,
        "capacity_bytes": profile.capacity_bytes,
        "library_bytes": profile.library_bytes,
        "launch": _launch_json(profile),
        "links": [{"between": list(ends), **_link_json(link)} for ends, link in links],
    }


def profile_table(profile: Profile) -> RenderableType:
    """Sums, then the ops that take longest, then the links."""
    facts = profile_json(profile)
    dearest = sorted(
        profile.costs.items(), key=lambda item: -item[1].forward_ms - item[1].backward_ms
    )
    headings = ("op", "forward", "backward", "of it weights", "saved", "workspace")
    ops = new_table(*headings, left=("op",))
    for name, cost in dearest[:_DEAREST]:
        ops.add_row(
            escape(name),
            ms_text(cost.forward_ms),
            ms_text(cost.backward_ms),
            ms_text(cost.weight_gradient_ms),
            bytes_text(sum(size for _, size in cost.saved)),
            bytes_text(cost.workspace_bytes),
        )
    if profile.loss is not None:
        loss = profile.loss
        ops.add_row("the loss", "", ms_text(loss.ms), "", "", bytes_text(loss.peak_bytes))
    links = new_table("link", "latency", "bandwidth", left=("link",))
    for link in facts["links"]:
        ends = " to ".join(map(str, link["between"])) or "any other two devices"
        speed = link["gb_per_s"]
        told = "nothing is copied" if speed is None else f"{speed:.1f} GB/s"
        links.add_row(ends, f"{1e3 * link['latency_ms']:.1f} us", told)
    heading = (
        f"[bold]{escape(profile.device)}[/bold], {profile.origin}: {plural(facts['ops'], 'op')} on "
        f"{plural(facts['rows'], 'row')}, {ms_text(facts['forward_ms'])} forward and "
        f"{ms_text(facts['backward_ms'])} backward, {ms_text(facts['weight_gradient_ms'])} of it "
        f"for weights; {bytes_text(facts['saved_bytes'])} are saved"
    )
    if facts["launch"] is not None:
        launch = facts["launch"]
        heading += (
            f"; the host launches that in {ms_text(launch['forward_ms'])} and "
            f"{ms_text(launch['backward_ms'])}"
        )
    return spaced([heading, ops, links])


def _launch_json(profile: Profile) -> dict[str, float] | None:
    """Of all ops, the loss and an action."""
    launch, n_ops = profile.launch, len(profile.costs)
    if launch is None:
        return None
    of_all = {"forward_ms": n_ops * launch.forward_ms, "backward_ms": n_ops * launch.backward_ms}
    return {**asdict(launch), **of_all}


def _link_json(link: Link) -> dict[str, float | None]:
    copies = not math.isinf(link.bytes_per_ms)
    return {
        "latency_ms": link.latency_ms,
        "gb_per_s": link.bytes_per_ms / 1e6 if copies else None,
    }
