"""What is planned, for which devices."""

from dataclasses import dataclass, replace

from fxpipe.costs.topology import between_processors
from fxpipe.errors import PlanError
from fxpipe.ir import Chain, CheckpointMode, Network
from fxpipe.passes.partition_costs import size_text
from fxpipe.passes.search.plan import LOOPS
from fxpipe.passes.search.plan import NAME as AUTO
from fxpipe.passes.simulate_launches import Hosts


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned, for which devices.

    `checkpoint` is a mode, or `auto`: then parts of stages may be computed again. A device holds
    `loops` stages; where that is None, the search tries each of `tried_loops`. Devices that are
    `processors` send by themselves, if not within one process. GPUs wait for their `hosts`.
    """

    chain: Chain
    n_devices: int
    n_microbatches: int
    network: Network
    capacity_bytes: tuple[int, ...]
    training_factor: float
    checkpoint: str = CheckpointMode.NEVER
    loops: int | None = None
    tried_loops: tuple[int, ...] = LOOPS
    processors: bool = False
    hosts: Hosts | None = None

    @property
    def recompute(self) -> bool:
        """Whether the search may compute blocks again."""
        return self.checkpoint == AUTO

    @property
    def room_bytes(self) -> tuple[int, ...]:
        """What each device has for stages. Raises PlanError where libraries take it all."""
        held = self.chain.library_bytes
        for d, capacity in enumerate(self.capacity_bytes):
            if capacity <= held:
                raise PlanError(
                    f"device {d} has {size_text(capacity)}, and libraries such as cuBLAS take "
                    f"{size_text(held)}: use devices with more memory"
                )
        return tuple(capacity - held for capacity in self.capacity_bytes)

    @property
    def least_launch_ms(self) -> float:
        """What the hosts take at least to launch a step, whatever the plan."""
        if self.hosts is None:
            return 0.0
        return self.hosts.least_ms(self.chain, self.n_devices, self.n_microbatches)

    def over(self, links: Network) -> "Question":
        """The same over the links of a topology, in place of measured ones, a process a device."""
        return replace(
            self,
            network=between_processors(links) if self.processors else links,
            hosts=self.hosts and replace(self.hosts, apart=True),
        )
