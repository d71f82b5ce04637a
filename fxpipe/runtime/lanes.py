"""One worker thread per device, started on first use and kept until the pipeline goes.

The first lane is the caller's own thread while that has nothing else to do: each thread that runs
ops has OpenMP threads of its own, and where there are more of these than cores, OpenMP lets them
sleep after each op.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from queue import SimpleQueue

import torch

from fxpipe.errors import InputError
from fxpipe.runtime import closure, stream
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.mailbox import StoppedError
from fxpipe.runtime.malloc import keep_freed_memory
from fxpipe.runtime.random import lent
from fxpipe.runtime.stream import Device, Stream
from fxpipe.runtime.turn import undisturbed

Job = Callable[[], None]
_Queue = SimpleQueue[Job | None]


class Lanes:
    """The worker threads of one pipeline, one per device."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._process = os.getpid()
        self._inside: set[int] = set()  # the threads that run jobs
        if any(stream.place(device).type == "cpu" for device in devices):
            keep_freed_memory()
        self._queues: tuple[_Queue, ...] = tuple(SimpleQueue() for _ in devices)
        # The threads know only their queues: the pipeline can be collected while they idle, or
        # when an interrupt comes as they start.
        weakref.finalize(self, _end, self._queues)
        for index, queue in enumerate(self._queues):
            threading.Thread(
                target=_work, args=(queue,), name=f"fxpipe lane {index}", daemon=True
            ).start()

    @property
    def are_here(self) -> bool:
        """Whether they are of this process: one that was forked off has no threads of theirs."""
        return self._process == os.getpid()

    def refuse_inside(self) -> None:
        """Raise InputError on a thread that runs a job: it would wait for itself."""
        if threading.get_ident() in self._inside:
            raise InputError(
                "the pipeline was called while it runs, by the loss function or a hook: its lanes "
                "are busy until that returns. Load the package a second time for that, or call it "
                "before the step"
            )

    def run(
        self,
        jobs: Sequence[Job],
        stop: Callable[[], None],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Run one job on each lane, under the caller's grad mode, autocast and streams.

        `meanwhile` runs here; without it, the first job does. If one fails, or the caller is
        interrupted, `stop` must make the others end soon. Then the first failure is raised here,
        after all have ended.
        """
        ambient = Ambient.capture()
        if ambient.counts_saved and len(jobs) > 1:
            raise InputError(
                "torch.utils.checkpoint around a pipeline goes by the order in which tensors are "
                "saved, which lanes that run at once don't have: let the pipeline compute stages "
                "again (fxpipe compile --checkpoint); around pipe(x) use_reentrant=True does too"
            )
        threads_before = torch.get_num_threads()
        n_threads = stream.threads_per_lane(self._devices)
        # A lane computes on the caller's current stream: what the caller launched before comes
        # before, what it launches afterwards after. (Virtual devices have streams of their own.)
        streams = [stream.current_stream(device) for device in self._devices]
        failures: list[BaseException] = []
        assignments = [
            _Assignment(
                job, ambient, n_threads, [streams[index], *streams], failures, stop, self._inside
            )
            for index, job in enumerate(jobs)
        ]
        begun: list[_Assignment] = []
        try:
            # A closure has the random numbers while it runs; what it runs here draws some as well.
            with lent() if closure.running() else nullcontext(), undisturbed():
                here = meanwhile or assignments[0]
                try:
                    for queue, assignment in zip(self._queues, assignments, strict=True):
                        if assignment is not here:
                            queue.put(assignment)
                            begun.append(assignment)
                    with suppress(StoppedError):  # a lane failed, and says below why
                        here()
                    _await(begun)
                except BaseException:
                    stop()
                    _await(begun)
                    raise
        finally:
            torch.set_num_threads(threads_before)
        # Those that were told to stop come after the one that was the reason.
        failure = next((f for f in failures if not isinstance(f, StoppedError)), None)
        if failure is not None:
            try:
                raise failure
            finally:
                # The traceback holds this frame, and through it the call's tensors.
                del failure, failures, assignments, assignment, begun, here


class _Assignment:
    """A job with the settings it runs under."""

    def __init__(
        self,
        job: Job,
        ambient: Ambient,
        n_threads: int,
        streams: Sequence[Stream],
        failures: list[BaseException],
        stop: Callable[[], None],
        inside: set[int],
    ) -> None:
        """`inside` has the thread while it runs."""
        self.done = threading.Event()
        self._job: Job | None = job
        self._ambient = ambient
        self._n_threads = n_threads
        self._streams = streams
        self._failures = failures
        self._stop = stop
        self._inside = inside

    def __call__(self) -> None:
        assert self._job is not None
        thread = threading.get_ident()
        self._inside.add(thread)
        try:
            stream.use_threads(self._n_threads)
            stream.use_context(self._streams[0])
            with self._ambient.entered(), stream.use_streams(self._streams):
                self._job()
        except BaseException as error:
            self._failures.append(error)
            self._stop()
        self._inside.discard(thread)
        # The caller may go on the moment it hears of the end: leave no tensor behind before.
        self._job = None
        self.done.set()


def _await(assignments: Sequence[_Assignment]) -> None:
    for assignment in assignments:
        assignment.done.wait()


def _work(queue: _Queue) -> None:
    while (job := queue.get()) is not None:
        job()
        del job


def _end(queues: Sequence[_Queue]) -> None:
    for queue in queues:
        queue.put(None)
