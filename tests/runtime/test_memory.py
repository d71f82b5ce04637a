"""Nothing of a step outlives it, and within it nothing outlives its last use."""

import gc
from collections import Counter
from threading import Event

import pytest
import torch
from pairs import all_pairs
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from toys import MODES, SKIPS, TOYS, Part, Toy, both, mean_loss

from fxpipe.errors import StageError
from fxpipe.runtime import package
from fxpipe.runtime.call import Call
from fxpipe.runtime.copy import Links
from fxpipe.runtime.mailbox import Mailbox
from fxpipe.runtime.memory import Tally
from fxpipe.runtime.step import Step
from fxpipe.schedule import Action, Kind


class Watch:
    """Weak references to the memory of all that the stages take and give."""

    def __init__(self, pipe):
        self.references = {}
        for stage in pipe._stages:
            stage.module.register_forward_hook(
                lambda module, inputs, output, j=stage.index: self._see(j, output)
            )

    def _see(self, j, output):
        for tensor in output if isinstance(output, tuple) else (output,):
            reference = StorageWeakRef(tensor.untyped_storage())
            self.references.setdefault(j, []).append(reference)

    def alive(self, j=None):
        every = [r for k, found in self.references.items() for r in found if j in (None, k)]
        assert every
        return sum(not reference.expired() for reference in every)


@pytest.fixture(autouse=True, scope="module")
def _without_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("name", "mode", "schedule"), all_pairs(TOYS, MODES, ["1f1b", "split"]))
def test_no_tensor_of_a_step_or_call_is_alive_after_it(tmp_path, name, mode, schedule):
    toy = TOYS[name]
    _, pipe = both(tmp_path, toy, schedule=schedule, checkpoint=mode)
    x = toy.inputs()
    # Torch imports parts of itself in the first random op, and keeps its frames until collection.
    pipe.step(*x, loss_fn=mean_loss)
    watch = Watch(pipe)
    pipe.step(*x, loss_fn=mean_loss)
    assert watch.alive() == 0
    with torch.no_grad():
        pipe(*x)
    assert watch.alive() == 0
    mean_loss(pipe(*x)).backward()
    assert watch.alive() == 0


def test_nor_after_a_failed_one(tmp_path):
    _, pipe = both(tmp_path, SKIPS, schedule="1f1b")
    watch = Watch(pipe)
    losses = iter([mean_loss, None])

    def loss_fn(output, target):
        return next(losses)(output)

    with pytest.raises(StageError):
        pipe.step(*SKIPS.inputs(), loss_fn=loss_fn)
    gc.collect()
    assert watch.alive() == 0


class ByMicroBatch:
    """Weak references to what the stages make and send for each micro-batch, all on one lane."""

    def __init__(self, pipe, inputs, monkeypatch):
        self.references = {}
        self._own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self._now = None
        for stage in pipe._stages:
            stage.module.register_forward_hook(lambda module, inputs, output: self._see(output))
        send_value, send_gradient, run = Call.send_value, Call.send_gradient, Step._run

        def seen_value(call, wire, i, tensor, gradient):
            self._see(tensor)
            send_value(call, wire, i, tensor, gradient)

        def seen_gradient(call, wire, j, i, gradient):
            self._see(gradient)
            send_gradient(call, wire, j, i, gradient)

        def watched(step, action):
            self._now = action.microbatch
            run(step, action)
            self.after(action)

        monkeypatch.setattr(Call, "send_value", seen_value)
        monkeypatch.setattr(Call, "send_gradient", seen_gradient)
        monkeypatch.setattr(Step, "_run", watched)

    def _see(self, output):
        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor is not None and tensor.untyped_storage().data_ptr() not in self._own:
                reference = StorageWeakRef(tensor.untyped_storage())
                self.references.setdefault(self._now, []).append(reference)

    def alive(self, i):
        return sum(not reference.expired() for reference in self.references[i])

    def after(self, action):
        """To be replaced: what to look at after each action."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TOYS)
def test_no_value_nor_gradient_outlives_its_micro_batch(tmp_path, monkeypatch, name, mode):
    toy = TOYS[name]
    _, pipe = both(tmp_path, toy, checkpoint=mode, devices=(0,) * len(toy.parts))
    x = toy.inputs()
    pipe.step(*x, loss_fn=mean_loss)
    watch = ByMicroBatch(pipe, x, monkeypatch)
    alive = {}

    def after(action):
        if action.stage == 0 and action.kind is Kind.BACKWARD:
            alive[action.microbatch] = watch.alive(action.microbatch)

    watch.after = after
    pipe.step(*x, loss_fn=mean_loss)
    assert alive == dict.fromkeys(range(4), 0)


@pytest.mark.parametrize("mode", MODES)
def test_values_are_held_for_the_micro_batches_in_flight_alone(tmp_path, mode):
    _, pipe = both(tmp_path, SKIPS, m=8, schedule="1f1b", checkpoint=mode)
    watch = Watch(pipe)
    most = [0] * 4
    for stage in pipe._stages:

        def see(module, inputs, output, j=stage.index):
            most[j] = max(most[j], watch.alive(j))

        stage.module.register_forward_hook(see)
    pipe.step(*SKIPS.inputs(), loss_fn=mean_loss)
    # Of 8 micro-batches stage j is never further ahead of its backwards than 4 - j; it may be
    # computing one of them again.
    assert all(most[j] <= 4 - j + (mode != "never") for j in range(4))


@pytest.mark.parametrize("mode", MODES)
def test_receive_buffers_are_those_of_micro_batches_in_flight(tmp_path, monkeypatch, mode):
    def parse_devices(devices):
        return tuple(torch.device("cpu", index) for index in range(len(devices)))

    monkeypatch.setattr(package, "parse_devices", parse_devices)
    _, pipe = both(tmp_path, SKIPS, m=8, schedule="1f1b", checkpoint=mode)
    copies, most, send = {}, {}, Links.send

    def seen(links, tensor, source, target, i):
        copied = send(links, tensor, source, target, i)
        if source < target:
            assert copied.data_ptr() != tensor.data_ptr()
            found = copies.setdefault((source, target), [])
            found.append(StorageWeakRef(copied.untyped_storage()))
            alive = sum(not reference.expired() for reference in found)
            most[source, target] = max(most.get((source, target), 0), alive)
        return copied

    monkeypatch.setattr(Links, "send", seen)
    pipe.step(*SKIPS.inputs(), loss_fn=mean_loss)
    wires = Counter(
        (wire.source, j) for wire, js in pipe._wires[True].readers.items() for j in js if j < 4
    )
    # Of 8 micro-batches stage j sends at most 4 - j ahead of their backwards.
    assert most
    assert all(most[pair] <= (4 - pair[0]) * wires[pair] for pair in most)


class Light(nn.Module):
    """No op saves its result or, after the first stage, its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))
        self.b = nn.Parameter(torch.ones(6))

    def forward(self, x):
        h = x * self.w
        return (h + self.b) - h.sum(1, keepdim=True)


LIGHT = Toy(
    Light,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.ones(6))

            def forward(self, x):
                return x * self.w
            """,
            (None,),
            ("h",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.b = nn.Parameter(torch.ones(6))

            def forward(self, h):
                return h + self.b
            """,
            (0,),
            ("g",),
        ),
        Part(
            """
            def forward(self, g, h):
                return g - h.sum(1, keepdim=True)
            """,
            (1, 0),
            ("y",),
        ),
    ),
)


def test_a_portal_lets_go_of_its_value_after_the_last_consumer(tmp_path, monkeypatch):
    _, pipe = both(tmp_path, LIGHT)
    watch = Watch(pipe)
    done = {Action(j, Kind.FORWARD, i): Event() for j in (0, 1, 2) for i in range(4)}
    alive, run = [], Step._run

    def watched(step, action):
        run(step, action)
        if action.kind is Kind.FORWARD:
            done[action].set()

    def loss_fn(output, target):
        # What a lane has sent may arrive before the lane itself is done with the action.
        assert all(done[Action(j, Kind.FORWARD, len(alive))].wait(60) for j in (0, 1))
        alive.append((watch.alive(0), watch.alive(1)))
        return output.mean()

    monkeypatch.setattr(Step, "_run", watched)
    pipe.step(*LIGHT.inputs(), loss_fn=loss_fn)
    # The last micro-batch has passed all stages; its backward has not begun.
    assert alive[-1] == (0, 0)


def test_a_stage_that_is_recomputed_keeps_its_inputs_alone(tmp_path):
    _, pipe = both(tmp_path, SKIPS, checkpoint="always")
    watch = Watch(pipe)
    alive = []

    def loss_fn(output, target):
        alive.append([watch.alive(j) for j in range(4)])
        return output.pow(2).mean()

    pipe.step(*SKIPS.inputs(), loss_fn=loss_fn)
    # a, b and c of four micro-batches are inputs; of y, the loss at hand has but its own.
    assert alive[-1] == [4, 4, 4, 1]


def test_a_gradient_is_let_go_of_by_the_backward_that_reads_it(tmp_path, monkeypatch):
    _, pipe = both(tmp_path, SKIPS, devices=(0,) * 4)
    sent, alive = {}, []
    send, run = Call.send_gradient, Step._run

    def seen(call, wire, j, i, gradient):
        if gradient is not None:
            reference = StorageWeakRef(gradient.untyped_storage())
            sent.setdefault((wire.source, i), []).append(reference)
        send(call, wire, j, i, gradient)

    def watched(step, action):
        run(step, action)
        if action.kind is Kind.BACKWARD:
            found = sent[action.stage, action.microbatch]
            alive.append(sum(not reference.expired() for reference in found))

    monkeypatch.setattr(Call, "send_gradient", seen)
    monkeypatch.setattr(Step, "_run", watched)
    pipe.step(*SKIPS.inputs(), loss_fn=mean_loss)
    assert alive == [0] * 16


class Joined(nn.Module):
    """The gradients of `a` and `b` are views of the concatenation's."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))

    def forward(self, x):
        a = (x * self.w).exp()
        return torch.cat([a, a.exp()], 1).relu()


JOINED = Toy(
    Joined,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.ones(6))

            def forward(self, x):
                return (x * self.w).exp()
            """,
            (None,),
            ("a",),
        ),
        Part(
            """
            def forward(self, a):
                return a.exp()
            """,
            (0,),
            ("b",),
        ),
        Part(
            """
            def forward(self, a, b):
                return torch.cat([a, b], 1).relu()
            """,
            (0, 1),
            ("y",),
        ),
    ),
)


@pytest.mark.parametrize("devices", [(0, 0, 0), (0, 1, 0)])
def test_a_gradient_that_waits_keeps_no_more_than_its_own_memory(tmp_path, monkeypatch, devices):
    _, pipe = both(tmp_path, JOINED, devices=devices)
    waiting, put = [], Mailbox.put

    def seen(mailbox, key, item):
        if key[0] == "gradient" and isinstance(item, torch.Tensor):
            waiting.append((item.untyped_storage().nbytes(), item.nbytes))
        put(mailbox, key, item)

    monkeypatch.setattr(Mailbox, "put", seen)
    pipe.step(*JOINED.inputs(), loss_fn=mean_loss)
    assert len(waiting) >= 12
    assert all(held <= own for held, own in waiting)


def test_a_tally_counts_what_is_alive_once_and_keeps_the_most():
    tally = Tally(2)
    a = torch.zeros(10)
    tally.add(0, [a, a[2:], a.view(2, 5)])
    tally.add(1, [a, torch.zeros(0)])
    assert tally.peaks == [40, 0]
    del a
    b = torch.zeros(4)
    tally.add(0, [b])
    assert tally.peaks == [40, 0]
    tally.add(0, [c := torch.zeros(7)])
    tally.add(0, [d := torch.zeros(1)])
    assert tally.peaks == [48, 0]
    del b, c, d


class Wide(nn.Module):
    """Two equal layers whose saved tensors outweigh all else."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(6))
        self.v = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return (torch.exp(x * self.w) * self.v).exp()


def _wide(parameter, line, source):
    text = f"""
        def __init__(self):
            super().__init__()
            self.{parameter} = nn.Parameter(torch.ones(6))

        def forward(self, {"x" if source is None else "h"}):
            return {line}
        """
    return Part(text, (source,), ("h" if source is None else "y",))


WIDE = Toy(
    Wide,
    (
        _wide("w", "torch.exp(x * self.w)", None),
        _wide("v", "(h * self.v).exp()", 0),
    ),
)


def test_measured_peaks_are_of_parameters_gradients_and_saved_tensors(tmp_path):
    _, pipe = both(tmp_path, WIDE)
    assert [peak.measured_bytes for peak in pipe.memory().peaks] == [None, None]
    x = torch.zeros(4000, 6, dtype=torch.float64)
    whole = x.numel() * 8
    pipe.step(x, loss_fn=mean_loss)
    measured = []
    # All four micro-batches are forward before the first is backward, and each stage has what it
    # was given and what its exp gave; the last one has their losses' gradients too. An action has
    # a few tensors of one micro-batch besides. In a step in which the first lane falls behind,
    # gradients wait for it: beside other work in most, but not in every one.
    for _ in range(500):
        with pipe.memory() as memory:
            pipe.step(x, loss_fn=mean_loss)
        measured.append([peak.measured_bytes for peak in memory.peaks])
        first, last = map(min, zip(*measured, strict=True))
        if first <= 3 * whole and last <= 4 * whole:
            break
    assert 2 * whole <= first <= 3 * whole
    assert 3 * whole <= last <= 4 * whole
    assert [peak.lanes for peak in memory.peaks] == [(0,), (1,)]
    assert "lane 1 on cpu: predicted 0.0 MiB, measured" in str(memory)


def test_fewer_micro_batches_in_flight_hold_less(tmp_path):
    x = torch.zeros(4000, 6, dtype=torch.float64)
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        _, pipe = both(tmp_path, WIDE, schedule=schedule)
        with pipe.memory() as memory:
            pipe.step(x, loss_fn=mean_loss)
        peaks[schedule] = memory.peaks[1].measured_bytes
    assert peaks["1f1b"] < 0.6 * peaks["gpipe"]


def test_a_loss_is_kept_as_a_number_not_as_the_memory_it_was_made_in(tmp_path):
    _, pipe = both(tmp_path, WIDE, schedule="1f1b")
    x = torch.zeros(4000, 6, dtype=torch.float64)
    room = x.nbytes // 4

    def in_much_memory(output, target):
        return torch.cat([mean_loss(output).reshape(1), output.detach().flatten()[1:]])[0]

    peaks = []
    for loss_fn in (lambda output, target: mean_loss(output), in_much_memory):
        with pipe.memory() as memory:
            pipe.step(x, loss_fn=loss_fn)
        peaks.append(memory.peaks[1].measured_bytes)
    assert peaks[1] - peaks[0] <= 3 * room


def test_lanes_have_copies_of_their_own_of_what_they_are_sent(tmp_path):
    _, pipe = both(tmp_path, WIDE, schedule="1f1b")
    x = torch.zeros(4000, 6, dtype=torch.float64)
    seen = []
    send = Links.send

    def spied(links, tensor, *ends):
        sent = send(links, tensor, *ends)
        seen.append(sent.data_ptr() == tensor.data_ptr())
        return sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "send", spied)
        pipe.step(x, loss_fn=mean_loss)
        assert all(seen)
        seen.clear()
        with pipe.memory():
            pipe.step(x, loss_fn=mean_loss)
        # Only the pipeline's output stays on its lane, whose gradient does so too.
        assert [not same for same in seen].count(True) == 8
