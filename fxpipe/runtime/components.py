"""torchgpipe's four optimisations, each of which can be left out, to see what it is worth.

After table 1 of Kim et al. (arXiv 2004.09910). Results are the same without.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

from fxpipe.errors import InputError
from fxpipe.runtime.manifest import Manifest
from fxpipe.runtime.relay import relayed
from fxpipe.runtime.stage import Stage


@dataclass(frozen=True, slots=True)
class Components:
    """What is on.

    `dependency`: the backward of `pipe(x)` is in the order that fork and join prescribe, not in
    whichever autograd comes upon. `streams`: copies run beside the stages, not on the streams they
    compute on. `portals`: a value goes straight to the stages that read it, not through all stages
    between. `checkpoint`: stages recompute as planned, instead of keeping what backward needs.
    """

    dependency: bool = True
    streams: bool = True
    portals: bool = True
    checkpoint: bool = True

    @classmethod
    def without(cls, names: Collection[str]) -> "Components":
        """All but those named. Raises InputError."""
        known = [field.name for field in fields(cls)]
        wrong = [repr(name) for name in names if name not in known]
        if wrong:
            raise InputError(
                f"without={names!r}: there is no {', '.join(wrong)}; use {', '.join(known)}"
            )
        return cls(**dict.fromkeys(names, False))

    def applied(
        self, manifest: Manifest, stages: Sequence[Stage]
    ) -> tuple[Manifest, Sequence[Stage]]:
        """A package's plan and stages with those that are a matter of the plan left out."""
        if not self.checkpoint:
            specs = [replace(stage.spec, checkpoint="never") for stage in stages]
            stages = [
                replace(s, spec=spec, recomputes=False)
                for s, spec in zip(stages, specs, strict=True)
            ]
            manifest = replace(manifest, stages=tuple(specs))
        return (manifest, stages) if self.portals else relayed(manifest, stages)


ALL = Components()
