"""What one rank sends and receives during one call, in the order of its row.

Shapes are the plan's. What the plan can't know, the dtype under autocast, how a value lies in
memory, and which gradients there are, each message says for itself the first time that the pipeline
is called in some way; from then on both ends know. How it lies it tells anew where a dim of one
item or none is longer now. A value whose shape depends on data tells it each time. So does a
gradient that was not there; one that is not there any more is marked (absence.py): a loss may use
an output in some steps only.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import StageError
from fxpipe.runtime.call import Call
from fxpipe.runtime.distributed.absence import is_absent, mark_absent
from fxpipe.runtime.distributed.layout import (
    HEADER_SIZE,
    Layout,
    Layouts,
    header_of,
    read_header,
)
from fxpipe.runtime.distributed.messages import Message, Row, maker
from fxpipe.runtime.distributed.ranks import Ranks
from fxpipe.runtime.distributed.transport import Transport
from fxpipe.runtime.random import RandomStream

# Tags: messages of known dtype and shape, those that a header tells of, and headers.
_KNOWN, _TOLD, _HEADER = 0, 1, 3


@dataclass(frozen=True, slots=True)
class _Posted:
    """A receive that has begun, into `tensor`; without `work` there is nothing to wait for.

    Without a tensor the message tells what it is, if there is any, in a header.
    """

    layout: Layout | None
    tensor: Tensor | None = None
    header: Tensor | None = None
    work: Any = None


class Exchange:
    """The messages of one call of rank `rank`, in the order of its row, `rows[rank]`.

    `layouts` is what an earlier call of this kind has `learnt`. `shape` gives a message's, None if
    it depends on data.
    """

    def __init__(
        self,
        ranks: Ranks,
        transport: Transport,
        call: Call,
        rows: Sequence[Row],
        layouts: Layouts | None,
        shape: Callable[[Message], tuple[int, ...] | None],
    ) -> None:
        self.row = rows[ranks.rank]
        self.learnt: dict[Message, Layout | None] = dict(layouts or {})
        self._layouts = layouts
        self._ranks = ranks
        self._transport = transport
        self._device = transport.device
        self._call = call
        self._shape = shape
        self._rows = rows
        self._posted: dict[int, deque[_Posted]] = defaultdict(deque)
        self._targets: dict[int, None] = {}
        self._sent: dict[Message, int] = {}  # as which of those to its target
        self._told: set[int] = set()  # targets of messages that told what they are
        self._waiting: Message | None = None
        self._leaving: Sequence[int] = ()

    def post(self, message: Message) -> None:
        """Begin to receive it, into memory of its own."""
        self._posted[message.source].append(self._begun(message))

    def receive(self, message: Message) -> None:
        """Wait for it, the first from its source that was posted and is not here, and deliver it.

        If the other rank is lost, it never is.
        """
        posted = self._posted[message.source].popleft()
        self._waiting = message
        try:
            if posted.work is not None:
                posted.work.wait()
            layout, tensor = posted.layout, posted.tensor
            if posted.header is not None:
                layout, tensor = self._heard(message, posted.header)
            elif message.what == "gradient" and tensor is not None and is_absent(tensor):
                tensor = None
        except RuntimeError as error:
            self._ranks.lose(message.source, error)
            return
        self._waiting = None
        item: object = tensor
        if message.what == "random" and tensor is not None:
            item = _unpacked(tensor, self._device)
        elif message.what == "value" and layout is not None:
            item = (tensor, layout.gradient)
        for key in message.keys:
            self._call.deliver(key, item)

    def send(self, message: Message) -> None:
        """Begin to send what the outbox has of it. Raises StageError."""
        (item, *_) = [self._call.outbox.take(key) for key in message.keys]
        if message.what == "random":
            self._begin(message, _packed(item, self._device), _KNOWN)
            return
        tensor: Tensor | None
        tensor, gradient = item if message.what == "value" else (item, False)
        shape = self._shape(message)
        if tensor is not None and shape is not None and tuple(tensor.shape) != shape:
            raise StageError(
                f"{message} has shape {list(tensor.shape)}, plan.json says {list(shape)}: make the "
                "stage file and plan.json fit, or compile again"
            )
        layout = self._known(message, shape)
        if layout is None or shape is None:
            self._tell(message, tensor, gradient)
            return
        if tensor is None:
            tensor = layout.empty(shape, self._device)
            mark_absent(tensor, str(message))
        elif (layout.dtype, layout.gradient) != (tensor.dtype, gradient):
            now, before = Layout.of(tensor, gradient), layout
            raise StageError(
                f"{message} is {now}, in earlier calls {before}: dtypes, and what has a gradient, "
                "must not depend on data"
            )
        self._begin(message, tensor.permute(layout.order), _KNOWN)

    def leave(self, message: Message) -> None:
        """Return once it has left, and those before it, if all their receives are posted ahead.

        Raises StoppedError if the call is stopped meanwhile.
        """
        if message in self._sent:
            self._leaving = [message.target]
            self._transport.leave(message.target, self._sent[message], lambda: self._call.check(0))
            self._leaving = ()

    def finish(self) -> None:
        """Return once all has been sent. Raises StoppedError if the call is stopped meanwhile."""
        self._leaving = [*self._targets]
        self._transport.finish(self._targets, lambda: self._call.check(0))
        self._leaving = ()

    @property
    def awaited(self) -> str | None:
        """What the row waits for, if it does."""
        if self._leaving:
            names = [str(self._ranks.in_world(rank)) for rank in self._leaving]
            return f"rank {' and '.join(names)} to take what was sent"
        if self._waiting is None:
            return None
        action = maker(self._rows, self._waiting)
        return (
            f"{action}: stage {action.stage}, micro-batch {action.microbatch}, "
            f"from rank {self._ranks.in_world(self._waiting.source)}"
        )

    def _known(self, message: Message, shape: tuple[int, ...] | None) -> Layout | None:
        """What both ends know of it, if they do and there was one."""
        layout = None if self._layouts is None else self._layouts[message]
        known = layout is not None and shape is not None and layout.holds_for(shape)
        return layout if known else None

    def _begin(self, message: Message, tensor: Tensor, tag: int) -> None:
        if tensor.numel():
            # Memory is sent as it lies: what is to be read as conjugate or negative is made so.
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            place = self._transport.send(plain, message.target, tag)
            self._targets[message.target] = None
            if tag != _KNOWN:
                self._told.add(message.target)
            elif message.target not in self._told:
                self._sent[message] = place

    def _tell(self, message: Message, tensor: Tensor | None, gradient: bool) -> None:
        layout = None if tensor is None else Layout.of(tensor, gradient)
        self.learnt[message] = layout
        shape = () if tensor is None else tensor.shape
        self._begin(message, header_of(layout, shape), _HEADER)
        if tensor is not None and layout is not None:
            # On the CPU too: what is known has been posted before it, and would be taken for it.
            self._begin(message, tensor.cpu().permute(layout.order), _TOLD)

    def _heard(self, message: Message, header: Tensor) -> tuple[Layout | None, Tensor | None]:
        """What follows the header."""
        layout, shape = read_header(header)
        self.learnt[message] = layout
        if layout is None:
            return None, None
        tensor = layout.empty(shape, torch.device("cpu"))
        if tensor.numel():
            self._receiving(message, tensor.permute(layout.order), _TOLD).wait()
        return layout, tensor.to(self._device)

    def _begun(self, message: Message) -> _Posted:
        if message.what == "random":
            tensor = torch.empty(_random_bytes(self._device), dtype=torch.uint8)
            return _Posted(None, tensor, work=self._receiving(message, tensor, _KNOWN))
        shape = self._shape(message)
        layout = self._known(message, shape)
        if layout is None or shape is None:
            header = torch.empty(HEADER_SIZE, dtype=torch.int64)
            return _Posted(None, None, header, self._receiving(message, header, _HEADER))
        tensor = layout.empty(shape, self._device)
        if not tensor.numel():
            return _Posted(layout, tensor)
        work = self._receiving(message, tensor.permute(layout.order), _KNOWN)
        return _Posted(layout, tensor, work=work)

    def _receiving(self, message: Message, tensor: Tensor, tag: int) -> Any:
        return self._transport.receive(tensor, message.source, tag)


@cache
def _random_bytes(device: torch.device) -> int:
    return 9 + torch.Generator(device).get_state().numel()


def _packed(random: RandomStream, device: torch.device) -> Tensor:
    """Seed, whether there is a state for such devices, and the state."""
    begun = device.type in random.states
    state = random.state(device)
    seed = torch.tensor([random.seed]).view(torch.uint8)
    return torch.cat([seed, torch.tensor([begun], dtype=torch.uint8), state])


def _unpacked(packed: Tensor, device: torch.device) -> RandomStream:
    seed = int(packed[:8].clone().view(torch.int64))
    return RandomStream(seed, {device.type: packed[9:].clone()} if packed[8] else {})
