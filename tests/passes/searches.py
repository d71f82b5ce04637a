"""Small searches."""

from fxpipe.ir import GIVEN, Chain, Link, Network, Plan
from fxpipe.passes.search.judge import SearchProblem
from fxpipe.passes.search.plan import NAME, search
from fxpipe.schedule import Schedule

ROOMY = 2**40
NETWORK = Network(Link(0.01, 1e5), {(0, 1): Link(0.05, 1e4, value_ms=0.02, byte_ms=1e-5)})


def problem(
    chain: Chain,
    p: int,
    m: int,
    capacity: int = ROOMY,
    recompute: bool = False,
    network: Network = NETWORK,
    table: Schedule | None = None,
) -> SearchProblem:
    edges = (0, *(k + 1 for k in range(len(chain.blocks) - 1) if chain.cuttable[k]))
    return SearchProblem(
        chain=chain,
        edges=(*edges, len(chain.blocks)),
        n_devices=p,
        n_microbatches=m,
        network=network,
        capacity_bytes=(capacity,) * p,
        training_factor=2.0,
        recompute=recompute,
        loops=(1, 2, 3),
        table=table,
    )


def searched(
    asked: SearchProblem, seed: int = 0, time_limit_s: float = 20.0, name: str = ""
) -> Plan:
    return search(
        asked.chain,
        n_devices=asked.n_devices,
        n_microbatches=asked.n_microbatches,
        network=asked.network,
        capacity_bytes=asked.capacity_bytes,
        training_factor=asked.training_factor,
        recompute=asked.recompute,
        loops=asked.loops,
        table=asked.table,
        schedule_name=name or (NAME if asked.table is None else GIVEN),
        seed=seed,
        time_limit_s=time_limit_s,
    )
