"""A model's parameters and buffers as safetensors files, one for each stage of its package."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

import fxpipe
from fxpipe.errors import PackageError
from fxpipe.runtime.manifest import Manifest

# "format" is asked for by transformers; the other tells our files from those put in their place.
_METADATA = {"format": "pt", "writer": f"fxpipe {fxpipe.__version__}"}


def write_weights(folder: Path, manifest: Manifest, state: Mapping[str, Tensor]) -> None:
    """Write `stage_0.safetensors` and so on: what each stage holds, under the model's names.

    A tied tensor stands once, under its first name, with the first stage that holds it; what no
    stage uses is in `unused.safetensors`. Tensors are written from where they lie, one by one,
    whatever their size. Raises PackageError for a tensor that the format does not know.
    """
    from safetensors.torch import save_file

    folder.mkdir()
    for file, names in _files(manifest).items():
        tensors = _apart({name: state[name].detach() for name in names})
        try:
            save_file(tensors, folder / file, metadata=_METADATA)
        except (KeyError, ValueError) as error:  # a dtype or a layout
            raise PackageError(
                f"safetensors can't hold the weights for {file} ({error}): leave them out, and "
                "load them from torch.save(model.state_dict(), ...)"
            ) from error


def refuse_valueless(model: str, tensors: Iterable[Tensor]) -> None:
    """Raise PackageError if `tensors` of the model of that name have no values to write."""
    if any(tensor.is_meta for tensor in tensors):
        raise PackageError(
            f"{model} was built without memory, so it has no values to write: leave --weights out, "
            "and load them by pipe.load_weights(path)"
        )


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and none in the memory of another, which safetensors refuses."""
    apart: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in storages else tensor
        apart[name] = apart[name].contiguous()
        storages.add(storage)
    return apart


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
