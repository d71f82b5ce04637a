"""The host's part: when it comes to launch each action of a table on devices that wait for it.

A GPU's ops are launched by the host, which runs ahead of it as long as ops are long. Where they are
short, the GPU waits; and the threads of one process, a lane's each, wait for each other, as most of
a launch is Python's. Within an action all its ops are taken for alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir import Chain, Launch
from fxpipe.passes.simulate_launches_kernel import launched_by_one
from fxpipe.passes.simulate_numbers import rows_of
from fxpipe.schedule import Kind, Schedule

# When a host begins and ends to launch each action of a table: (2, actions row by row).
Launched = NDArray[np.float64]

_MATTERS = 0.5


@dataclass(frozen=True, slots=True)
class Hosts:
    """What launching takes, by one process for all devices, or by one for each, `apart`."""

    launch: Launch
    apart: bool = False

    @classmethod
    def of(cls, launch: Launch | None) -> "Hosts | None":
        """One for all devices, where launching takes time."""
        return None if launch is None else cls(launch)

    def matter(self, chain: Chain, n_devices: int) -> bool:
        """Whether launching takes half as long as what the devices do, shared by all evenly."""
        one = self.launch
        launch_ms = self._microbatch_ms(chain, n_devices)
        if self.apart:
            launch_ms /= n_devices
        else:
            launch_ms *= one.serial + (1 - one.serial) / n_devices
        taken_ms = sum(block.forward_ms + block.backward_ms for block in chain.blocks)
        return launch_ms > _MATTERS * taken_ms / n_devices

    def least_ms(self, chain: Chain, n_devices: int, n_microbatches: int) -> float:
        """What launching takes at least in any step: one stage has the fewest actions.

        One of the devices launches no less than the mean, and one process no two serial shares at
        once.
        """
        share = 1 / n_devices if self.apart else max(self.launch.serial, 1 / n_devices)
        return share * n_microbatches * self._microbatch_ms(chain, 1)

    def _microbatch_ms(self, chain: Chain, n_stages: int) -> float:
        """What launching a micro-batch takes, with nothing computed again."""
        one, n_ops = self.launch, _ops(chain, 0, len(chain.blocks))
        whole_ms = n_ops * (one.forward_ms + one.backward_ms) + one.loss_ms
        return whole_ms + 2 * n_stages * one.action_ms

    def launched(
        self,
        chain: Chain,
        cuts: Sequence[int],
        schedule: Schedule,
        recompute: Sequence[Sequence[bool]],
        segments: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> Launched:
        """By when each action begins and ends to be launched, in ms: (2, actions row by row)."""
        rows = rows_of(schedule)
        takes = self._takes(chain, cuts, schedule, recompute, segments)
        if not self.apart:
            shape = schedule.n_stages, schedule.n_microbatches
            return launched_by_one(*rows, takes, self.launch.serial, *shape)  # type: ignore[no-any-return]
        ends = np.concatenate([np.cumsum(row) for row in np.split(takes, rows[0][:-1])])
        return np.stack((ends - takes, ends))

    def _takes(
        self,
        chain: Chain,
        cuts: Sequence[int],
        schedule: Schedule,
        recompute: Sequence[Sequence[bool]],
        segments: Sequence[Sequence[tuple[int, int]]],
    ) -> NDArray[np.float64]:
        """Milliseconds of the host for each action. Halves of a backward take equally long."""
        one = self.launch
        bounds = [*pairwise((0, *cuts, len(chain.blocks)))]
        n_ops = [_ops(chain, begin, end) for begin, end in bounds]
        n_again = [0] * len(bounds)
        for j, runs in enumerate(segments):
            n_again[j] = sum(_ops(chain, *run) for run in runs)

        def takes(kind: Kind, j: int, i: int) -> float:
            last = one.loss_ms if j == len(bounds) - 1 else 0.0
            forward_ms, backward_ms = n_ops[j] * one.forward_ms, n_ops[j] * one.backward_ms
            if kind is Kind.FORWARD:
                return one.action_ms + forward_ms + last
            again_ms = forward_ms if recompute[j][i] else n_again[j] * one.forward_ms
            if kind is Kind.BACKWARD:
                return one.action_ms + backward_ms + again_ms
            return one.action_ms + backward_ms / 2 + (again_ms if kind is Kind.INPUT else 0.0)

        flat = [action for row in schedule.rows for action in row]
        return np.array([takes(a.kind, a.stage, a.microbatch) for a in flat])


def _ops(chain: Chain, begin: int, end: int) -> int:
    return sum(len(block.ops) for block in chain.blocks[begin:end])
