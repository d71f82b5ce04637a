"""What one rank sends and receives during one call, in the order of its row.

Shapes are the plan's. What the plan can't know, the dtype under autocast and which gradients there
are, each message says for itself the first time that the pipeline is called in some way; from then
on both ends know. Only a value whose shape depends on data tells it each time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.errors import StageError
from fxpipe.runtime.call import Call
from fxpipe.runtime.messages import Message, Row, Send, arrivals, maker
from fxpipe.runtime.random import RandomStream
from fxpipe.runtime.ranks import Ranks

_AHEAD = 2  # receives posted beyond the one that is waited for, from each rank
_KNOWN, _TOLD = 0, 1  # tags: messages of known dtype and shape, and those that tell theirs
_DIMS = 16
_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known of a message: its dtype, and whether the value has a gradient."""

    dtype: torch.dtype
    gradient: bool


# None: there is no gradient to send.
Layouts = Mapping[Message, Layout | None]


class Exchange:
    """The messages of one call of rank `rank`, whose row is `rows[rank]`.

    `layouts` is what an earlier call of this kind has `learnt`. `shape` gives a message's, None if
    it depends on data.
    """

    def __init__(
        self,
        ranks: Ranks,
        call: Call,
        rows: Sequence[Row],
        layouts: Layouts | None,
        shape: Callable[[Message], tuple[int, ...] | None],
    ) -> None:
        self.learnt: dict[Message, Layout | None] = dict(layouts or {})
        self._layouts = layouts
        self._ranks = ranks
        self._call = call
        self._shape = shape
        self._rows = rows
        self._arriving = arrivals(rows, ranks.rank)
        self._places = {m: k for all_ in self._arriving.values() for k, m in enumerate(all_)}
        self._posted = dict.fromkeys(self._arriving, 0)
        self._finishing = False
        sent = [item.message for item in rows[ranks.rank] if isinstance(item, Send)]
        self._targets = list(dict.fromkeys(message.target for message in sent))
        for source in self._arriving:
            self._post(source, _AHEAD)

    def receive(self, message: Message) -> None:
        """See to it that `message` comes, and those that are sent before it."""
        self._post(message.source, self._places[message] + 1 + _AHEAD)

    def send(self, message: Message) -> None:
        """Begin to send what the outbox has of it. Raises StageError."""
        (item, *_) = [self._call.outbox.take(key) for key in message.keys]
        if message.what == "random":
            self._begin(message, _packed(item), _KNOWN)
            return
        tensor: Tensor | None
        tensor, gradient = item if message.what == "value" else (item, False)
        shape = self._shape(message)
        if tensor is not None and shape is not None and tuple(tensor.shape) != shape:
            raise StageError(
                f"{message} has shape {list(tensor.shape)}, plan.json says {list(shape)}: make the "
                "stage file and plan.json fit, or compile again"
            )
        if self._layouts is None or shape is None:
            self._tell(message, tensor, gradient)
            return
        layout = self._layouts[message]
        if layout is None and tensor is None:
            return
        if tensor is None:
            assert layout is not None
            tensor = torch.zeros(shape, dtype=layout.dtype)
        if layout != Layout(tensor.dtype, gradient):
            found, before = Layout(tensor.dtype, gradient), layout or "none"
            raise StageError(
                f"{message} is another one than in earlier calls: {found}, before {before}. What "
                "has a gradient must not depend on data"
            )
        self._begin(message, tensor, _KNOWN)

    def finish(self) -> None:
        """Return once all has been sent. Raises StoppedError if the call is stopped meanwhile."""
        self._finishing = True
        self._ranks.flush(self._targets, lambda: self._call.check(0))
        self._finishing = False

    @property
    def awaited(self) -> str | None:
        """What the row waits for, if it does."""
        if self._finishing:
            names = [str(self._ranks.in_world(rank)) for rank in self._targets]
            return f"rank {' and '.join(names)} to take what was sent"
        keys = self._call.awaited
        for message in chain(*self._arriving.values()):
            if not keys.isdisjoint(message.keys):
                action = maker(self._rows, message)
                return (
                    f"{action}: stage {action.stage}, micro-batch {action.microbatch}, "
                    f"from rank {self._ranks.in_world(message.source)}"
                )
        return None

    def _begin(self, message: Message, tensor: Tensor, tag: int) -> None:
        if tensor.numel():
            tensor = tensor.detach().contiguous()
            work = dist.isend(tensor, group=self._ranks.group, tag=tag, group_dst=message.target)
            assert work is not None
            # Until it has left, its memory is held by the thread that waits for it.
            self._ranks.sending[message.target].put(work.wait)

    def _tell(self, message: Message, tensor: Tensor | None, gradient: bool) -> None:
        header = torch.zeros(3 + _DIMS, dtype=torch.int64)
        header[0] = -1 if tensor is None else _DTYPES.index(tensor.dtype)
        header[1] = gradient
        if tensor is not None:
            header[2 : 3 + tensor.dim()] = torch.tensor([tensor.dim(), *tensor.shape])
        self._begin(message, header, _TOLD)
        if tensor is not None:
            self._begin(message, tensor, _TOLD)
        self.learnt[message] = None if tensor is None else Layout(tensor.dtype, gradient)

    def _post(self, source: int, until: int) -> None:
        messages = self._arriving[source]
        for message in messages[self._posted[source] : until]:
            self._await(message)
        self._posted[source] = max(self._posted[source], min(until, len(messages)))

    def _await(self, message: Message) -> None:
        """Post the receive; the thread for its source waits for it and delivers."""
        worker = self._ranks.receiving[message.source]
        if message.what == "random":
            tensor = torch.empty(_random_bytes(), dtype=torch.uint8)
            layout = Layout(torch.uint8, False)
        else:
            shape = self._shape(message)
            if self._layouts is None or shape is None:
                worker.put(partial(self._hear, message))
                return
            known = self._layouts[message]
            if known is None:
                self._deliver(message, None, None)
                return
            layout = known
            tensor = torch.empty(shape, dtype=layout.dtype)
        if not tensor.numel():
            self._deliver(message, tensor, layout)
            return
        group, source = self._ranks.group, message.source
        work = dist.irecv(tensor, group=group, tag=_KNOWN, group_src=source)
        assert work is not None

        def arrive() -> None:
            work.wait()
            self._deliver(message, tensor, layout)

        worker.put(arrive)

    def _hear(self, message: Message) -> None:
        """Receive a message that tells what it is."""
        header = torch.zeros(3 + _DIMS, dtype=torch.int64)
        group, source = self._ranks.group, message.source
        dist.recv(header, group=group, tag=_TOLD, group_src=source)
        dtype, gradient, dim, *sizes = header.tolist()
        layout = None if dtype < 0 else Layout(_DTYPES[dtype], bool(gradient))
        tensor = None
        if layout is not None:
            tensor = torch.empty(sizes[:dim], dtype=layout.dtype)
            if tensor.numel():
                dist.recv(tensor, group=group, tag=_TOLD, group_src=source)
        self.learnt[message] = layout
        self._deliver(message, tensor, layout)

    def _deliver(self, message: Message, tensor: Tensor | None, layout: Layout | None) -> None:
        item: object = tensor
        if message.what == "random" and tensor is not None:
            item = _unpacked(tensor)
        elif message.what == "value" and layout is not None:
            item = (tensor, layout.gradient)
        for key in message.keys:
            self._call.deliver(key, item)


def _random_bytes() -> int:
    return 9 + torch.default_generator.get_state().numel()


def _packed(random: RandomStream) -> Tensor:
    """Seed, whether there is a state, and the state."""
    begun = "cpu" in random.states
    state = random.state(torch.device("cpu"))
    seed = torch.tensor([random.seed]).view(torch.uint8)
    return torch.cat([seed, torch.tensor([begun], dtype=torch.uint8), state])


def _unpacked(packed: Tensor) -> RandomStream:
    seed = int(packed[:8].clone().view(torch.int64))
    return RandomStream(seed, {"cpu": packed[9:].clone()} if packed[8] else {})
