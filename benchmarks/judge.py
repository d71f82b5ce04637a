"""A bare chain under the simulator: the step and the memory of cuts and a table, in quick turns."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from fxpipe.chain_file import ChainFile
from fxpipe.jit import compiled
from fxpipe.passes import simulate_kernel
from fxpipe.passes.search import cut_kernel as search_cut_kernel
from fxpipe.passes.search.chain import chain_arrays, links_of
from fxpipe.passes.simulate_numbers import rows_of
from fxpipe.schedule import Schedule

Cuts = tuple[int, ...]
Rank = tuple[int, float]


class Judge:
    """Costs of a chain, summed up so that those of any cuts are known at once."""

    def __init__(self, file: ChainFile) -> None:
        self.file = file
        self.n_blocks = len(file.chain.blocks)
        self._arrays = chain_arrays(file.chain, file.training_factor)

    def times(self) -> list[float]:
        """Forward and backward of all blocks before each."""
        blocks = self.file.chain.blocks
        return [0.0, *accumulate(block.forward_ms + block.backward_ms for block in blocks)]

    def bytes(self) -> list[int]:
        """Parameters and what is saved of one micro-batch, of all blocks before each."""
        held = ((*block.parameters, *block.saved) for block in self.file.chain.blocks)
        return [0, *accumulate(sum(size for _, size in one) for one in held)]

    def on(self, schedule: Schedule) -> Callable[[Sequence[Cuts]], list[Rank]]:
        """What to sort cuts by under `schedule`: bytes over the capacity, then the step in ms."""
        rows = rows_of(schedule)
        links = links_of(self.file.network, len(schedule.rows))
        places = np.array(schedule.stage_to_device)
        capacity = np.full(len(schedule.rows), self.file.capacity_bytes)
        arrays = tuple(self._arrays)

        def ranks(of: Sequence[Cuts]) -> list[Rank]:
            bounds = np.array([(0, *cuts, self.n_blocks) for cuts in of])
            over, steps_ms = _ranks(
                bounds, schedule.n_microbatches, places, rows, arrays, links, capacity
            )
            return list(zip(over.tolist(), steps_ms.tolist(), strict=True))

        return ranks


@compiled
def _ranks(bounds, n_microbatches, places, rows, arrays, links, capacity):  # type: ignore[no-untyped-def]
    """Bytes over and ms of each row of `bounds`, what stages begin and end at."""
    over, steps_ms = np.zeros(len(bounds), np.int64), np.zeros(len(bounds))
    free = np.zeros(len(places))
    for k in range(len(bounds)):
        numbers, _ = search_cut_kernel.cut(
            bounds[k], n_microbatches, places, free, 1.0, *arrays, *links
        )
        ran = simulate_kernel.run(
            *rows, np.empty((0, 0, 0)), np.empty((0, 0), np.bool_), np.empty(0, np.int64), 0.0, 0,
            *numbers, False, np.empty((2, 0)),
        )  # fmt: skip
        over[k], steps_ms[k] = np.maximum(ran[7] - capacity, 0).sum(), ran[5].max()
    return over, steps_ms


def equal(sums: Sequence[float], n_stages: int) -> Cuts:
    """Cuts where `sums` grows by nearly as much in each stage, a block in each at least."""
    inner = np.asarray(sums)
    cuts: list[int] = []
    for j in range(1, n_stages):
        cut = int(np.abs(inner - inner[-1] * j / n_stages).argmin())
        least = cuts[-1] + 1 if cuts else 1
        cuts.append(min(max(cut, least), len(sums) - 1 - (n_stages - j)))
    return tuple(cuts)
