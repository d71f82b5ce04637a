"""Machine code of what a search runs, before its time begins."""

from functools import cache
from math import inf
from random import Random

from fxpipe.ir import Block, Chain, Link, Network, Value
from fxpipe.passes.search.begin import begun
from fxpipe.passes.search.forms import Forms
from fxpipe.passes.search.judge import Judge, SearchProblem
from fxpipe.passes.search.refine import refined, settled


@cache
def warm() -> None:
    """Begin, move and draw once, with four blocks on two devices: a process waits for it once."""
    blocks = [
        Block((), 1.0, 2.0, saved=((f"b{k}", 1),), parameters=(), weight_gradient_ms=1.0)
        for k in range(4)
    ]
    values = [Value(f"v{k}", 1, k, (k + 1,), gradient=True) for k in range(4)]
    problem = SearchProblem(
        chain=Chain(tuple(blocks), tuple(values), (True,) * 4),
        edges=(0, 1, 2, 3, 4),
        n_devices=2,
        n_microbatches=2,
        network=Network(Link(0.0, 1.0)),
        capacity_bytes=(6, 6),
        training_factor=1.0,
        recompute=True,
        loops=(1, 2),
    )
    judge, random = Judge(problem), Random(0)
    found = begun(judge, (0, 1), None, inf)
    judge.shifted(found, 1, 0)
    refined(judge, settled(judge, found, random), random)
    for short in (False, True):
        Forms(judge, 0, random, short=short).draw(1.0, lambda _: True)
