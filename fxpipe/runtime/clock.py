"""The forward of `pipe(x)`: stage j runs micro-batch i in clock cycle k = i + j, autograd watching.

After torchgpipe (sections 2.2 and 3). Each lane runs its part of the clock cycles in order and
waits for values alone, not for the other lanes' cycle to end. Fork and join make backward run the
micro-batches of a stage in the opposite order.

    input ── join ── Checkpoint ──┬────────────── join ── fork ── output     backward runs from
              ↑          stage    └ Recompute ────┘         │                right to left: what
    phony of micro-batch i-1                       phony for micro-batch i+1  forks waits for it
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fxpipe.runtime.call import Call
from fxpipe.runtime.checkpoint import Replay, checkpointed, recomputes
from fxpipe.runtime.compiled import refuse_further_backwards
from fxpipe.runtime.dependency import Turns
from fxpipe.schedule import Action, Kind


class Clock:
    """One forward of all micro-batches. `bound` names, by stage, the stand-ins of tied weights.

    Without `dependency` nothing is forked and joined.
    """

    def __init__(
        self, call: Call, bound: Mapping[int, Iterable[str]], dependency: bool = True
    ) -> None:
        self._call = call
        self._bound = bound
        self._turns = [Turns(dependency) for _ in range(call.n)]

    def run_lane(self, lane: int) -> None:
        """Run the lane's part, clock cycle by clock cycle."""
        call = self._call
        for k in range(call.m + call.n - 1):
            for j in range(max(0, k - call.m + 1), min(k, call.n - 1) + 1):
                if call.lane(j) == lane:
                    call.check(lane)
                    self._forward(j, k - j)

    def _forward(self, j: int, i: int) -> None:
        call = self._call
        values = {wire: call.value(wire, j, i)[0] for wire in call.wires.reads[j]}
        values = dict(zip(values, self._turns[j].begin(list(values.values())), strict=True))
        inputs = [values[wire] for wire in call.takes[j]]
        outputs = self._turns[j].end(self._compute(j, i, inputs))
        for output, wire in zip(outputs, call.makes[j], strict=True):
            if wire in call.wires.readers:
                call.send_value(wire, i, output, output.requires_grad)

    def _compute(self, j: int, i: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        call, stage = self._call, self._call.stages[j]
        action = str(Action(j, Kind.FORWARD, i))
        random = call.random(j, i)
        outputs: Sequence[Tensor]
        if torch.is_grad_enabled() and recomputes(stage.spec, i, call.m):
            bound = frozenset(self._bound.get(j, ()))
            replay = Replay(stage, action, random)
            outputs, random = checkpointed(replay, inputs, stage.trainable(bound), bound)
        else:
            outputs, random = stage.at(action, lambda: stage.forward(inputs, random))
            if stage.is_compiled:
                refuse_further_backwards(j, outputs)
        call.pass_random(j, i, random)
        return list(outputs)
