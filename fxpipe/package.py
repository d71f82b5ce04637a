"""A compiled package in memory, and how it is written to disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fxpipe.edits import refuse_loss, sealed
from fxpipe.errors import PackageError
from fxpipe.ir import Capture, Chain, PackageFiles, Plan, Profile, Wiring
from fxpipe.outputs import whole_folder
from fxpipe.runtime.manifest import Manifest
from fxpipe.standalone import with_runtime
from fxpipe.weights import refuse_valueless, write_weights


@dataclass(frozen=True, slots=True)
class Package:
    """All that compiling a model gave. `timings` are seconds by pass."""

    manifest: Manifest
    capture: Capture
    profile: Profile
    chain: Chain
    plan: Plan
    wiring: Wiring
    emitted: PackageFiles
    timings: Mapping[str, float]

    def __repr__(self) -> str:
        """A line: its fields are a model, its graph and its costs, which fill a screen each."""
        plan = self.manifest
        return (
            f"<package of {plan.model}: {len(plan.stages)} stages, {plan.microbatches} "
            f"micro-batches, {plan.schedule}>"
        )

    @property
    def files(self) -> Mapping[str, str]:
        """The text of each file by name, but for plan.json, which is the manifest."""
        return self.emitted.files

    def write(self, path: str | Path, *, weights: bool = False, standalone: bool = False) -> Path:
        """Write the package to the folder `path`, replacing a package of ours whole.

        With `weights`, the model's values too, which `load` then gives it; with `standalone`, the
        runtime, so that torch alone is needed to run it. Files are written beside `path` and moved,
        so that it is at all times the old package, the new one, or absent; what a process that was
        killed left beside is put back or removed. Raises PackageError if `path` is anything else
        than a package, or one with files edited by hand, or if weights are asked for and the model
        was built without memory.
        """
        path = Path(path)
        refuse_loss(path)
        if weights:
            refuse_valueless(self.manifest.model, self.capture.state.values())
        try:
            with whole_folder(path) as folder:
                self._write_new(folder, weights, standalone)
        except OSError as error:
            raise PackageError(f"{path} can't be written: {error.strerror or error}") from error
        return path

    def _write_new(self, folder: Path, weights: bool, standalone: bool) -> None:
        files = with_runtime(self.files) if standalone else self.files
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        if self.emitted.buffers:
            torch.save(dict(self.emitted.buffers), folder / "buffers.pt")
        if weights:
            write_weights(folder / "weights", self.manifest, self.capture.state)
        plan = sealed(self.manifest, folder).to_json()
        (folder / "plan.json").write_text(plan, encoding="utf-8")
