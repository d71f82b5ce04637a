"""A pipeline without portals: what a later stage than the next reads goes through all between."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fxpipe.runtime.manifest import Manifest, OutputSpec, PortSpec
from fxpipe.runtime.portal import CALLER, Wire, source_of
from fxpipe.runtime.stage import Stage


@dataclass(frozen=True, slots=True)
class Relay:
    """A stage's forward that also returns what it takes beyond the module's `n_inputs`."""

    module: nn.Module
    n_inputs: int

    def __call__(self, *arguments: Tensor | None) -> tuple[Any, ...]:
        """The module's outputs, then the rest of `arguments`."""
        returned = self.module(*arguments[: self.n_inputs])
        own = returned if isinstance(returned, tuple) else (returned,)
        return *own, *arguments[self.n_inputs :]


def relayed(
    manifest: Manifest, stages: Sequence[Stage], *, inputs_to_end: bool = False
) -> tuple[Manifest, list[Stage]]:
    """The plan and the stages with each portal in hops from stage to stage.

    With `inputs_to_end`, inputs that the model gives back go through all stages too.
    """
    n = len(stages)
    made = {
        **{Wire(CALLER, i.value): OutputSpec(i.value, None, i.spec) for i in manifest.inputs},
        **{
            Wire(s.index, o.value): replace(o, stage=s.index)
            for s in stages
            for o in s.spec.outputs
        },
    }
    last_reader: dict[Wire, int] = {}
    for stage in stages:
        for port in stage.spec.inputs:
            last_reader[Wire(source_of(port.source), port.value)] = stage.index
    for output in manifest.outputs:
        if output.stage is not None or inputs_to_end:
            last_reader[Wire(source_of(output.stage), output.value)] = n
    relaying = []
    for stage in stages:
        j = stage.index
        passed = [made[w] for w, last in last_reader.items() if w.source < j < last]
        ports = [
            PortSpec(f"relay_{k}", spec.value, spec.stage, False, spec.spec, spec.mode)
            for k, spec in enumerate(passed)
        ]
        spec = replace(
            stage.spec,
            inputs=tuple(_from_before(port, j) for port in (*stage.spec.inputs, *ports)),
            outputs=(
                *stage.spec.outputs,
                *(replace(o, value=_relayed(Wire(source_of(o.stage), o.value))) for o in passed),
            ),
        )
        relay = Relay(stage.module, len(stage.spec.inputs))
        relaying.append(replace(stage, spec=spec, relay=relay))
    outputs = tuple(
        o
        if o.stage == n - 1 or (o.stage is None and not inputs_to_end)
        else replace(o, stage=n - 1, value=_relayed(Wire(source_of(o.stage), o.value)))
        for o in manifest.outputs
    )
    specs = tuple(stage.spec for stage in relaying)
    return replace(manifest, stages=specs, outputs=outputs), relaying


def _from_before(port: PortSpec, j: int) -> PortSpec:
    """The port of stage j, the stage before it being where the value comes from."""
    source = source_of(port.source)
    if source == j - 1:
        return port
    return replace(port, source=j - 1, value=_relayed(Wire(source, port.value)), portal=False)


def _relayed(wire: Wire) -> str:
    """A name for a value on its way that no stage's own value has."""
    return f"{wire.value} of {wire.source}"
