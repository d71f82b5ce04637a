"""One step simulated: seconds and peak memory, as JSON. Run by `planner.py`.

python benchmarks/simulator.py 1f1b 1024 4096 1    schedule, devices, micro-batches, loops
"""

import json
import resource
import sys
import time

from fxpipe.ir import Link, Network
from fxpipe.passes import order
from fxpipe.passes.simulate import simulate
from fxpipe.passes.simulate_costs import Message, StageCost


def step(name: str, p: int, m: int, loops: int) -> dict[str, float]:
    """Make the table and simulate it; seconds by the clock, and of the processor."""
    started, used = time.perf_counter(), time.process_time()
    table = order.build(name, p, m, loops)
    n = p * loops
    stages = [StageCost(1.0, 2.0, static_bytes=8, saved_bytes=8, weight_gradient_ms=1.0)] * n
    messages = [Message(j, j + 1, 8, 8) for j in range(n - 1)]
    between = time.perf_counter()
    recompute = [[False] * m] * n
    simulate(table, stages, messages, Network(Link(0.01, 1e6)), recompute, record=False)
    return {
        "actions": sum(map(len, table.rows)),
        "table_s": between - started,
        "step_s": time.perf_counter() - between,
        "processor_s": time.process_time() - used,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main() -> None:
    name, *sizes = sys.argv[1:]
    p, m, loops = map(int, sizes)
    step(name, 2, 2, loops)  # compiles what numba compiles
    print(
        json.dumps(
            min(
                (step(name, p, m, loops) for _ in range(5 if p * m < 10**4 else 1)),
                key=lambda found: found["step_s"],
            )
        )
    )


if __name__ == "__main__":
    main()
