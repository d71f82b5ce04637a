"""A model's parameters and buffers as safetensors files, one for each stage of its package."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

import fxpipe
from fxpipe.errors import PackageError, WeightsError
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.weights.tensor_file import bytes_of, entries_of, refuse_unwritable, write

# "format" is asked for by transformers; the other tells our files from those put in their place.
_METADATA = {"format": "pt", "writer": f"fxpipe {fxpipe.__version__}"}


def write_weights(folder: Path, manifest: Manifest, state: Mapping[str, Tensor]) -> None:
    """Write `stage_0.safetensors` and so on: what each stage holds, under the model's names.

    A tied tensor stands once, under its first name, with the first stage that holds it; what no
    stage uses is in `unused.safetensors`. Tensors are written from where they lie, one by one,
    whatever their size. Raises PackageError for a tensor that the format does not know.
    """
    files = _files(manifest)
    if files:  # a model may hold nothing
        folder.mkdir()
    for file, names in files.items():
        entries = entries_of({name: state[name] for name in names})
        try:
            refuse_unwritable(entries)
        except WeightsError as error:
            raise PackageError(
                f"{error}: leave weights out, and load them from torch.save(...)"
            ) from error
        contents = (bytes_of(state[entry.name]) for entry in entries)
        write(folder / file, entries, contents, _METADATA)


def refuse_valueless(model: str, tensors: Iterable[Tensor]) -> None:
    """Raise PackageError if `tensors` of the model of that name have no values to write."""
    if any(tensor.is_meta for tensor in tensors):
        raise PackageError(
            f"{model} was built without memory, so it has no values to write: leave --weights out, "
            "and load them by pipe.load_weights(path)"
        )


def _files(manifest: Manifest) -> dict[str, list[str]]:
    """The names of the tensors in each file."""
    first_names = {spec.name: spec.alias_of or spec.name for spec in manifest.state}
    homes: dict[str, str] = {}
    for j, stage in enumerate(manifest.stages):
        for name in (*stage.parameters, *stage.buffers):
            homes.setdefault(first_names[name], f"stage_{j}.safetensors")
    files: dict[str, list[str]] = {}
    for spec in manifest.state:
        if spec.kind != "constant" and spec.alias_of is None:
            files.setdefault(homes.get(spec.name, "unused.safetensors"), []).append(spec.name)
    return files
