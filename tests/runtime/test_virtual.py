"""One GPU is cut once, into groups of equal size, and each has streams of its own."""

# ruff: noqa: N802

import sys
from types import SimpleNamespace

import pytest
import torch

from fxpipe.errors import DeviceError
from fxpipe.runtime import copy, virtual
from fxpipe.runtime.copy import End
from fxpipe.runtime.virtual import VirtualDevice

SUCCESS = 0


class Driver:
    """What cuda.bindings' driver gives for a GPU of `n_sms` SMs, noting what it was asked."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, n_sms=132, most=99):
        self.n_sms, self.most, self.asked, self.streams = n_sms, most, [], 0

    def cuDeviceGet(self, gpu):
        return SUCCESS, f"device {gpu}"

    def cuDeviceGetDevResource(self, device, kind):
        return SUCCESS, SimpleNamespace(sm=SimpleNamespace(smCount=self.n_sms))

    def cuDevSmResourceSplitByCount(self, n, whole, flags, least):
        self.asked.append((n, flags, least))
        n = min(n, self.most)
        return SUCCESS, [f"{least} SMs, group {k}" for k in range(n)], n, "the rest"

    def cuDevResourceGenerateDesc(self, groups, n):
        assert len(groups) == n == 1
        return SUCCESS, groups[0]

    def cuGreenCtxCreate(self, described, device, flags):
        return SUCCESS, f"{described} of {device}"

    def cuGreenCtxStreamCreate(self, context, flags, priority):
        assert (flags, priority) == (1, 0)
        self.streams += 1
        return SUCCESS, self.streams


@pytest.fixture
def _hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle, device: (handle, str(device)), raising=True
    )
    yield
    virtual._contexts.cache_clear()
    virtual._stream.cache_clear()
    virtual._numbers.cache_clear()


def use(monkeypatch, driver):
    monkeypatch.setattr(virtual, "_driver", lambda: driver)
    return driver


@pytest.mark.usefixtures("_hopper")
def test_all_groups_are_split_off_at_once(monkeypatch):
    driver = use(monkeypatch, Driver())
    devices = virtual.cut(0, 4)
    assert virtual.cut(0, 4) == devices == tuple(VirtualDevice(0, 4, k) for k in range(4))
    assert driver.asked == [(4, 0, 32)]
    assert virtual._contexts(0, 4)[3] == "32 SMs, group 3 of device 0"


@pytest.mark.usefixtures("_hopper")
def test_a_device_has_one_compute_stream_and_32_others(monkeypatch):
    use(monkeypatch, Driver())
    first, second = virtual.cut(1, 2)
    own = virtual.compute_stream(first)
    assert own == (1, "cuda:1")
    assert virtual.compute_stream(VirtualDevice(1, 2, 0)) == own
    others = {virtual.new_stream(first) for _ in range(100)}
    assert len({own, virtual.compute_stream(second), *others}) == 34


@pytest.mark.usefixtures("_hopper")
def test_too_many_groups_are_refused_with_how_many_there_can_be(monkeypatch):
    use(monkeypatch, Driver())
    with pytest.raises(DeviceError, match=r"132 SMs, and a group has 8 .* cuda:0/16 at most"):
        virtual.cut(0, 17)
    use(monkeypatch, Driver(most=3))
    with pytest.raises(DeviceError, match="3 groups of 32 only: ask for cuda:0/3"):
        virtual.cut(0, 4)
    with pytest.raises(DeviceError, match="one group of SMs at least"):
        virtual.cut(0, 0)


@pytest.mark.parametrize(
    ("major", "n_sms", "of", "size"),
    [
        (9, 132, 4, 32),
        (9, 132, 2, 64),
        (8, 108, 4, 26),
        (8, 84, 5, 16),
        (7, 80, 3, 26),
        (6, 7, 2, 3),
    ],
)
def test_groups_are_as_large_as_the_chips_granularity_allows(monkeypatch, major, n_sms, of, size):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (major, 0))
    assert virtual.group_size(0, n_sms, of) == size


@pytest.mark.usefixtures("_hopper")
def test_the_drivers_errors_are_told(monkeypatch):
    driver = use(monkeypatch, Driver())
    driver.cuGreenCtxCreate = lambda *_: (801,)
    driver.cuGreenCtxCreate.__name__ = "cuGreenCtxCreate"
    with pytest.raises(DeviceError, match="cuGreenCtxCreate says 801"):
        virtual.cut(0, 2)


def test_without_cuda_bindings_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"pip install 'fxpipe\[virtual\]'"):
        virtual._driver()


class Stream:
    """Notes what it waits for."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


def two_lanes():
    """The ends of two lanes that compute on different streams of one device."""
    log = []
    ends = [
        End(torch.device("cpu"), Stream(f"compute {k}", log), Stream(f"copy {k}", log))
        for k in range(2)
    ]
    return *ends, log


FORWARD = ["copy 0 waits for compute 0", "compute 1 waits for copy 0"]
BACK = ["copy 0 waits for compute 1", "compute 0 waits for copy 0"]


def test_between_virtual_devices_nothing_is_copied_but_streams_wait():
    source, target, log = two_lanes()
    x = torch.ones(2)
    sent = copy._send(x, source, target)
    assert log == FORWARD[:1]
    assert copy._receive(sent, source, target) is x
    assert log == FORWARD


def test_the_gradient_goes_back_the_same_way():
    source, target, log = two_lanes()
    x = torch.ones(2, requires_grad=True)
    y = copy._receive(copy._send(x * 3, source, target), source, target)
    assert log == FORWARD
    y.sum().backward()
    assert log == FORWARD + BACK
    assert torch.equal(x.grad, torch.full((2,), 3.0))


def test_on_one_stream_no_one_waits():
    source, _, log = two_lanes()
    x = torch.ones(2)
    assert copy._receive(copy._send(x, source, source), source, source) is x
    assert log == []
