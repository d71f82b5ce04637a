"""buffers.pt: the values that buffers begin with where no constructor makes them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.stage import Stage

_FILE = "buffers.pt"


def saved_buffers(
    folder: Path, manifest: Manifest, whole: Iterable[Stage], broken: list[str]
) -> dict[str, Tensor]:
    """The values in buffers.pt, if there are some; what is wrong with them goes to `broken`.

    Of the stages `whole` it must have each buffer that no module of torch.nn makes.
    """
    if not (folder / _FILE).exists():
        held = any(state.kind != "parameter" for state in manifest.state)
        if held and _FILE in manifest.files:
            broken.append(f"{_FILE} is missing")
        return {}
    try:
        values: dict[str, Tensor] = torch.load(
            folder / _FILE, map_location="cpu", weights_only=True
        )
    except Exception as error:
        broken.append(f"{_FILE} can't be read: {error}")
        return {}
    broken += _other_names(manifest, whole, values)
    return values


def _other_names(
    manifest: Manifest, whole: Iterable[Stage], values: Mapping[str, Tensor]
) -> Iterator[str]:
    shapes = {state.name: state.spec.sizes({}) for state in manifest.state}
    for name, value in values.items():
        if name not in shapes:
            yield f"{_FILE} has {name!r}, which plan.json does not list"
        elif tuple(value.shape) != shapes[name]:
            yield f"{_FILE}: {name!r} has shape {tuple(value.shape)}, plan.json says {shapes[name]}"
    for stage in whole:
        for name in _not_made(stage.module):
            if name not in values:
                yield f"{_FILE} lacks {name!r}, whose values {stage.spec.file} does not make"


def _not_made(module: nn.Module) -> Iterator[str]:
    """The buffers that code of the package declares, and fills with anything."""
    for path, owner in module.named_modules(remove_duplicate=False):
        if not type(owner).__module__.startswith("torch.nn.") or type(owner) is nn.Module:
            for name in owner._buffers:
                yield f"{path}.{name}" if path else name
