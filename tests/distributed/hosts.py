"""Two hosts on one machine: network namespaces, joined by a cable that can be made bad, or cut."""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Literal

DELAY_MS = 10
LOSS = 0.02
INTERFACE = "cable"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000

Cable = Literal["good", "netem", "relay"]


class NotAllowedError(Exception):
    """This machine does not let us, or can't."""


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def name(host: int) -> str:
    """Its namespace, made by this process."""
    return f"fxpipe-{os.getpid()}-{host}"


def enter(namespace: str) -> None:
    """Put this thread, and what it starts, on that host."""
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(file, 0):
        raise NotAllowedError(f"setns: {os.strerror(ctypes.get_errno())}")
    os.close(file)


def ip(*command: str) -> None:
    _run("ip", *command)


def cut() -> None:
    """Cut the cable, from the host that this process is on."""
    ip("link", "set", INTERFACE, "down")


@contextmanager
def two(cable: Cable) -> Iterator[list[str]]:
    """The namespaces of hosts 0 and 1, while the block runs. Raises NotAllowedError.

    Packets take DELAY_MS each way, and LOSS of them are lost, by the kernel's `netem`, or by a
    `relay` of our own; none on a good cable.
    """
    with ExitStack() as stack:
        for host in (0, 1):
            ip("netns", "add", name(host))
            stack.callback(ip, "netns", "delete", name(host))
            _on(host, "ip", "link", "set", "lo", "up")
        if cable == "relay":
            stack.enter_context(_relay())
        else:
            ends = [("name", INTERFACE, "netns", name(host)) for host in (0, 1)]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in (0, 1):
            _on(host, "ip", "address", "add", f"{address(host)}/24", "dev", INTERFACE)
            _on(host, "ip", "link", "set", INTERFACE, "up")
            if cable == "netem":
                bad = f"netem delay {DELAY_MS}ms loss {LOSS:.0%}"
                _on(host, *f"tc qdisc add dev {INTERFACE} root {bad}".split())
        yield [name(host) for host in (0, 1)]


def _on(host: int, *command: str) -> None:
    ip("netns", "exec", name(host), *command)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise NotAllowedError(f"{command[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise NotAllowedError(f"{' '.join(command)}: {error.stderr.strip()}") from error


@contextmanager
def _relay() -> Iterator[None]:
    """Carry packets between the hosts' ends, late and not all."""
    over, ready = threading.Event(), threading.Event()

    def carry() -> None:
        ends = [_end(host) for host in (0, 1)]
        partners = {ends[0]: ends[1], ends[1]: ends[0]}
        ready.set()
        late: list[tuple[float, int, bytes]] = []
        while not over.is_set():
            wait_s = max(0.0, late[0][0] - time.monotonic()) if late else 0.1
            for end in select.select(ends, [], [], wait_s)[0]:
                packet = os.read(end, 2**16)
                if random.random() >= LOSS:
                    due = time.monotonic() + DELAY_MS / 1e3
                    heapq.heappush(late, (due, partners[end], packet))
            while late and late[0][0] <= time.monotonic():
                _, end, packet = heapq.heappop(late)
                with suppress(OSError):  # it is not up
                    os.write(end, packet)
        for end in ends:
            os.close(end)

    with ThreadPoolExecutor(1) as pool:
        carrying = pool.submit(carry)
        while not ready.wait(0.1) and not carrying.done():
            pass
        try:
            yield
        finally:
            over.set()
            carrying.result()


def _end(host: int) -> int:
    """The host's end of the cable, as a file of its packets."""
    enter(name(host))
    try:
        end = os.open("/dev/net/tun", os.O_RDWR)
    except OSError as error:
        raise NotAllowedError(f"/dev/net/tun: {error}") from error
    settings = struct.pack("16sH", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI)
    fcntl.ioctl(end, _TUNSETIFF, settings)
    return end
