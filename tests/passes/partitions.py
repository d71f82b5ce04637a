"""Partitions with what matters little left out."""

from fxpipe.ir import Chain, CheckpointMode, Link, Network, Plan
from fxpipe.passes.partition import partition

LINK = Link(latency_ms=0.01, bytes_per_ms=1e5)


def plan(chain: Chain, n_stages: int, n_microbatches: int = 4, **options: object) -> Plan:
    settings = {
        "schedule": "1f1b",
        "checkpoint": CheckpointMode.NEVER,
        "network": Network(LINK),
        "capacity_bytes": (10**9,) * n_stages,
        "solver": "dp",
    }
    return partition(
        chain, n_stages=n_stages, n_microbatches=n_microbatches, **{**settings, **options}
    )
