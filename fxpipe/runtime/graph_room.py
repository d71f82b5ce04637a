"""Where CUDA graphs are captured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fxpipe.runtime.stream import use_streams, wait_stream

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GraphRoom:
    """Where graphs are captured: on which stream, and into whose memory; they never overlap."""

    on: torch.cuda.Stream
    pool: Any


def graph_room(device: torch.device) -> GraphRoom:
    """A room for graphs of `device`."""
    on = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return GraphRoom(on, torch.cuda.graph_pool_handle())


@contextmanager
def in_room(room: GraphRoom) -> Iterator[None]:
    """Compute on the room's stream, between what this thread launches before and afterwards."""
    callers = torch.cuda.current_stream(room.on.device)
    wait_stream(room.on, callers)
    try:
        with use_streams([room.on]):
            yield
    finally:
        wait_stream(callers, room.on)


def captured(room: GraphRoom, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """What `run` gives, not computed yet, and what computes it, into the same memory each time."""
    graph = torch.cuda.CUDAGraph()
    # A capture that fails does not give the thread's stream back. Other threads may go on
    # meanwhile, with data to load, say.
    with (
        use_streams([torch.cuda.current_stream(room.on.device)]),
        torch.cuda.graph(graph, room.pool, room.on, capture_error_mode="thread_local"),
    ):
        result = run()
    return result, graph.replay
