"""Schedules on even stages, by simulation, and CP-SAT's own order with one stage a device.

    python benchmarks/orders.py [--limit 60]

F, I and W take 10 ms each of a device's share of the model, messages nothing. The first table has
the bubble and the most micro-batches that a device holds activations of; where it holds two stages,
each counts half. In the second, a device has room for p micro-batches, as many as 1F1B needs, and
CP-SAT starts from each of two named schedules; no step is shorter than the bound. Where the
schedule that it starts from is as short as the bound, there is nothing to search.
"""

import argparse
import time

from common import machine
from markdown_table import table

from fxpipe.ir import Link, Network
from fxpipe.passes import order
from fxpipe.passes.order_cpsat import solve
from fxpipe.passes.order_problem import OrderProblem
from fxpipe.passes.simulate import simulate
from fxpipe.passes.simulate_costs import StageCost
from fxpipe.schedule import Schedule

SIZES = [(4, 8), (8, 16), (8, 32)]
SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb-h1", 1),
    ("zb-h2", 1),
    ("interleaved", 2),
    ("bfs", 2),
    ("zb-v", 2),
]
PART_MS, BYTES = 10.0, 1000
FREE = Network(Link(latency_ms=0.0, bytes_per_ms=float("inf")))
# ScheduleInterleavedZeroBubble and ScheduleZBVZeroBubble of torch.distributed.pipelining 2.13, both
# with two stages a device, simulated in the same way.
PEER = [(0.059, 4), (0.068, 8), (0.035, 8)]


def even(schedule: Schedule, loops: int) -> list[StageCost]:
    part_ms = PART_MS / loops
    cost = StageCost(part_ms, 2 * part_ms, saved_bytes=BYTES // loops, weight_gradient_ms=part_ms)
    return [cost] * schedule.n_stages


def bubbles() -> str:
    rows = []
    for name, loops in SCHEDULES:
        cells = []
        for p, m in SIZES:
            schedule = order.build(name, p, m, loops)
            never = [[False] * m] * schedule.n_stages
            found = simulate(schedule, even(schedule, loops), [], FREE, never)
            cells.append(f"{found.bubble:.3f} / {max(found.peak_bytes) / BYTES:g}")
        rows.append([name, loops, *cells])
    peer = [f"{bubble:.3f} / {peak}" for bubble, peak in PEER]
    rows.append(["torch's interleaved ZB and ZBV", 2, *peer])
    return table(["schedule", "stages a device", *(f"p={p} m={m}" for p, m in SIZES)], rows)


def optima(limit_s: float) -> str:
    titles = ["p, m", "from", "its step, ms", "CP-SAT's, ms", "bound, ms", "seconds"]
    rows = []
    for p, m in SIZES:
        for name in ("1f1b", "zb-h1"):
            hint = order.build(name, p, m)
            problem = OrderProblem(
                tuple(even(hint, 1)),
                (),
                FREE,
                hint.stage_to_device,
                (p * BYTES,) * p,
                ((False,) * m,) * p,
            )
            started = time.perf_counter()
            found, bound_ms = solve(problem, hint=hint, seed=0, time_limit_s=limit_s)
            seconds = time.perf_counter() - started
            steps_ms = [problem.simulate(schedule).step_ms for schedule in (hint, found)]
            cells = [f"{ms:.0f}" for ms in (*steps_ms, bound_ms)]
            rows.append([f"{p}, {m}", name, *cells, f"{seconds:.1f}"])
    return table(titles, rows, text=["from"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of each search")
    options = parser.parse_args()
    print(f"{machine()}\n\nBubble / micro-batches held at most\n\n{bubbles()}\n")
    print(f"CP-SAT, one worker, seed 0, at most {options.limit:g} s\n\n{optima(options.limit)}")


if __name__ == "__main__":
    main()
