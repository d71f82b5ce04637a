"""A step is marked as it runs.

What a lane does is marked on the stream that does it, so on CUDA the times are the device's own,
not the host's.
"""

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fxpipe.errors import InputError
from fxpipe.runtime import stream
from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.runtime.read_json import refuse_another
from fxpipe.runtime.stream import Device, Mark, Stream
from fxpipe.runtime.trace import COPY, TRACE, Event, Part, write

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class _Marked:
    lane: int
    name: str
    kind: str
    start: Mark
    end: Mark


class Recorder:
    """Marks what the lanes of one step do. Any lane's thread may record.

    Of the package's lanes the first is number `first`.
    """

    def __init__(self, devices: Sequence[Device], first: int = 0) -> None:
        self._devices = tuple(devices)
        self._first = first
        self._marked: list[_Marked] = []
        self._starts: list[list[Mark]] = [[] for _ in devices]
        # Events of different devices have no common clock: all begin idle, at one moment.
        self._idle()
        self.zero_ms = 1e3 * time.perf_counter()
        self._zeros = [self._now(lane) for lane in range(len(self._devices))]

    @contextmanager
    def span(self, lane: int, name: str, kind: str) -> Iterator[None]:
        """The block, on the lane's own thread, is what it does as `name`."""
        starts = self._starts[lane]
        starts.append(self._now(lane))
        yield
        self._marked.append(_Marked(lane, name, kind, starts.pop(), self._now(lane)))

    def arrived(self, lane: int) -> None:
        """What the lane's span has waited for is there: it begins now."""
        self._starts[lane][-1] = self._now(lane)

    @contextmanager
    def copying(self, lane: int, name: str, on: Stream) -> Iterator[None]:
        """The block copies something of the lane's on the stream `on`."""
        start = stream.mark(on)
        yield
        self._marked.append(_Marked(lane, name, COPY, start, stream.mark(on)))

    def events(self) -> list[Event]:
        """What was recorded, once all devices are done."""
        self._idle()
        return sorted(
            (
                Event(
                    self._first + one.lane,
                    one.name,
                    one.kind,
                    stream.ms_between(self._zeros[one.lane], one.start),
                    stream.ms_between(self._zeros[one.lane], one.end),
                )
                for one in self._marked
            ),
            key=lambda event: (event.start_ms, -event.end_ms),
        )

    def _now(self, lane: int) -> Mark:
        return stream.mark(stream.current_stream(self._devices[lane]))

    def _idle(self) -> None:
        for device in dict.fromkeys(self._devices):
            stream.synchronize(device)


class Trace:
    """As a context, writes the last step of the block to `path`, beside that of `estimate`.

    `devices` are this process's, of the package's the first is number `first`, and `use` is told
    what to record steps with, and at last that nothing is.
    """

    def __init__(
        self,
        path: str | Path,
        devices: Sequence[Device],
        estimate: EstimateSpec,
        use: Callable[["Trace | None"], None],
        first: int = 0,
    ) -> None:
        self._path = Path(path)
        self._devices = tuple(devices)
        self._estimate = estimate
        self._use = use
        self._first = first
        self._last: Recorder | None = None
        self._part: Part | None = None

    def recorder(self) -> Recorder:
        """For a step that begins."""
        self._last = Recorder(self._devices, self._first)
        return self._last

    def part_recorder(self, step: str, replica: int | None) -> Recorder:
        """For a step that begins here and in other processes, as `Part` has it."""
        recorder = self.recorder()
        self._part = Part(step, replica, _clock(), recorder.zero_ms)
        return recorder

    def __enter__(self) -> None:
        refuse_another(self._path, *TRACE)
        # Told before the steps, not after them.
        if self._path.is_dir():
            raise InputError(f"{self._path} can't be written: it is a folder: name a file in it")
        if not self._path.parent.is_dir():
            raise InputError(f"{self._path} can't be written: no folder {self._path.parent}")
        self._use(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._use(None)
        if kind is not None:
            return
        if self._last is None:
            raise InputError("no step ran while it was to be traced: call pipe.step(...)")
        lanes = dict(enumerate(map(str, self._devices), self._first))
        write(self._path, lanes, self._estimate, self._last.events(), self._part)


def _clock() -> str:
    """Names what `time.perf_counter` reads: a machine has one from when it starts until it ends."""
    return f"{platform.node()} {_BOOT.read_text().strip() if _BOOT.exists() else ''}"
