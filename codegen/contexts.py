"""The settings that a part of a forward runs under, as the contexts of a `with`."""

from collections.abc import Iterator

from fxpipe.ops.regions import Region


def contexts(region: Region) -> Iterator[str]:
    """The contexts of a `with` that opens `region`."""
    if not region.grad:
        yield "torch.no_grad()"
    for each in region.autocasts:
        kind = "device.type" if each.here else f'"{each.device_type}"'
        dtype = "" if each.dtype is None else f"dtype={each.dtype}, "
        cached = each.enabled and each.cache is not None
        cache = f", cache_enabled={each.cache}" if cached else ""
        yield f"torch.autocast({kind}, {dtype}enabled={each.enabled}{cache})"
    if region.kernels is not None:
        chosen = ", ".join(f"SDPBackend.{name}" for name in region.kernels.names)
        order = ", set_priority=True" if region.kernels.in_order else ""
        yield f"sdpa_kernel([{chosen}]{order})"
