"""What a GPU's host takes to launch the whole graph: by one thread, and by one for each part.

Each phase finds its GPU with nothing to do: a host gets ahead of a busy one by some thousand
launches, and then waits for it, which is no time of the host's.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from fxpipe.costs.twin import Twin
from fxpipe.ir import Launch
from fxpipe.runtime.lanes import Lanes
from fxpipe.runtime.stream import Device, current_stream, synchronize, use_streams

_REPEATS = 8

Part = tuple[Device, Twin]
_FORWARD = (Twin.forward, Twin.loss)
_BACKWARD = (Twin.backward,)


def launching(parts: Sequence[Part], lanes: Lanes, n_ops: int) -> tuple[Launch, float]:
    """Medians, of a graph of so many ops; and of the milliseconds of a turn of all parts at once.

    Threads that launch at once, as `lanes` do, take longer by the time that each has for itself.
    """
    turns = [_alone(part) for _ in range(_REPEATS) for part in parts]
    forward_ms, loss_ms, backward_ms = map(statistics.median, zip(*turns, strict=True))
    alone_ms, n = forward_ms + loss_ms + backward_ms, len(parts)
    at_once_ms = statistics.median(_at_once(parts, lanes) for _ in range(_REPEATS))
    together_ms = min(at_once_ms, n * alone_ms)
    serial = max(0.0, together_ms / alone_ms - 1) / (n - 1) if n > 1 else 1.0
    return Launch(forward_ms / n_ops, backward_ms / n_ops, loss_ms, serial=serial), together_ms


def _alone(part: Part) -> list[float]:
    """Milliseconds of the forward, of the loss and of the backward."""
    device, _ = part
    return [_ms([device], partial(_run, part, [phase])) for phase in (*_FORWARD, *_BACKWARD)]


def _at_once(parts: Sequence[Part], lanes: Lanes) -> float:
    """Milliseconds of a turn of each part, by threads.

    Every other one begins with its backward: in a step there are lanes at both, of which forwards
    share Python's lock and backwards a thread of autograd's.
    """
    behind = parts[1::2]
    for part in behind:
        _run(part, _FORWARD)
    jobs = [
        partial(_run, part, (*_BACKWARD, *_FORWARD) if part in behind else (*_FORWARD, *_BACKWARD))
        for part in parts
    ]
    ms = _ms([device for device, _ in parts], lambda: lanes.run(jobs, lambda: None))
    for part in behind:
        _run(part, _BACKWARD)
    return ms


def _run(part: Part, phases: Sequence[Callable[[Twin], None]]) -> None:
    device, twin = part
    with use_streams([current_stream(device)]):
        for run in phases:
            run(twin)


def _ms(devices: Sequence[Device], launch: Callable[[], None]) -> float:
    for device in devices:
        synchronize(device)
    started = time.perf_counter()
    launch()
    return 1e3 * (time.perf_counter() - started)
