"""What is sent is waited for if all before it that goes to the same rank has its receive posted."""

from types import SimpleNamespace

import pytest
import torch

from fxpipe.runtime.distributed.exchange import Exchange
from fxpipe.runtime.distributed.layout import Layout
from fxpipe.runtime.distributed.messages import Message
from fxpipe.runtime.portal import Wire

VALUE = torch.ones(2, 3)


class Sends:
    """A transport that notes what is waited for."""

    device = torch.device("cpu")

    def __init__(self):
        self.begun, self.waited = [], []

    def send(self, tensor, target, tag):
        self.begun.append(target)
        return self.begun.count(target)

    def leave(self, target, n, check):
        self.waited.append((target, n))


def value(i, target):
    return Message("value", Wire(0, "x0"), (1,), i, 0, target)


@pytest.mark.parametrize(
    ("told", "waited"), [(None, [(1, 2), (2, 1)]), (1, [(2, 1)]), (2, [(1, 2)])]
)
def test_a_message_is_not_waited_for_behind_one_whose_receive_is_not_posted(told, waited):
    """One that tells what it is is received when it is needed."""
    messages = [value(0, 1), value(0, 2), value(1, 1), value(1, 2)]
    layouts = dict.fromkeys(messages, Layout.of(VALUE, False))
    layouts |= {message: None for message in messages[:2] if message.target == told}
    transport, outbox = Sends(), SimpleNamespace(take=lambda key: (VALUE, False))
    call = SimpleNamespace(outbox=outbox, check=None)
    exchange = Exchange(
        SimpleNamespace(rank=0), transport, call, [()], layouts, lambda message: VALUE.shape
    )
    for message in messages:
        exchange.send(message)
    exchange.leave(messages[2])
    exchange.leave(messages[1])
    assert transport.waited == waited
