"""Lanes work for the caller, fail as one, and end with the pipeline."""

import gc
import signal
import sys
import threading
import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from toys import CHAIN, SCHEDULES, SKIPS, assert_same_state, both, mean_loss, plain_step, write

from fxpipe.errors import InputError, StageError
from fxpipe.runtime import load
from fxpipe.runtime.ambient import Ambient
from fxpipe.runtime.attention import kernels_in_order
from fxpipe.runtime.lanes import Lanes

CPU = torch.device("cpu")


def _lanes():
    return [t for t in threading.enumerate() if t.name.startswith("fxpipe lane")]


@pytest.fixture(autouse=True)
def _no_lane_left_behind():
    before = _lanes()
    yield
    gc.collect()
    _ended(before)


def _ended(before):
    """All lanes that were not there before have ended."""
    threads = [thread for thread in _lanes() if thread not in before]
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def test_a_lane_per_device_kept_over_calls_and_gone_with_the_pipeline(tmp_path):
    _, pipe = both(tmp_path, SKIPS)
    before = _lanes()
    pipe(*SKIPS.inputs())
    # Lanes of a test before this one may end at any time.
    threads = [thread for thread in _lanes() if thread not in before]
    assert len(threads) == 4
    pipe.step(*SKIPS.inputs(), loss_fn=mean_loss)
    assert [thread for thread in _lanes() if thread not in before] == threads
    gc.disable()
    try:
        del pipe
        _ended(before)
    finally:
        gc.enable()


def test_an_interrupt_as_lanes_begin_leaves_none(monkeypatch):
    before, start = _lanes(), threading.Thread.start

    def interrupted(thread):
        if thread.name == "fxpipe lane 1":
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Lanes([CPU, CPU])
    gc.collect()
    _ended(before)


@pytest.mark.parametrize("busy", [False, True])
def test_the_first_lane_is_the_callers_thread_unless_it_has_other_work(busy):
    """Else there would be a thread more that has OpenMP threads of its own."""
    lanes, ran = Lanes([CPU, CPU]), {}

    def note(name):
        ran[name] = threading.current_thread().name

    jobs = [lambda: note("first"), lambda: note("second")]
    lanes.run(jobs, lambda: None, (lambda: note("meanwhile")) if busy else None)
    own = threading.current_thread().name
    assert ran.pop("second") == "fxpipe lane 1"
    assert ran == ({"first": "fxpipe lane 0", "meanwhile": own} if busy else {"first": own})


def test_python_collects_no_garbage_while_lanes_run():
    lanes, seen = Lanes([CPU]), []

    def fails():
        seen.append(gc.isenabled())
        raise KeyError

    lanes.run([lambda: seen.append(gc.isenabled())], stop=lambda: None)
    with pytest.raises(KeyError):
        lanes.run([fails], stop=lambda: None)
    assert seen == [False, False]
    assert gc.isenabled()

    gc.disable()
    try:
        lanes.run([lambda: None], stop=lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_lanes_carry_the_callers_grad_mode_and_autocast():
    lanes = Lanes([CPU, CPU])

    def seen():
        found = []
        lanes.run([lambda: found.append(Ambient.capture()), lambda: None], lambda: None)
        assert found == [Ambient.capture()]

    seen()
    with torch.no_grad():
        seen()
    with torch.inference_mode():
        seen()
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        seen()
    seen()


def test_lanes_have_a_thread_each_and_leave_the_callers_number_alone():
    torch.set_num_threads(4)
    lanes = Lanes([CPU, CPU])
    found = []
    lanes.run([lambda: found.append(torch.get_num_threads())] * 2, lambda: None)
    assert found == [1, 1]
    assert torch.get_num_threads() == 4
    fresh = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    assert found[-1] == 4


def _failing(folder, schedule="1f1b", checkpoint="never"):
    """Its stage 1 fails on large values."""
    write(folder, CHAIN, schedule=schedule, checkpoint=checkpoint)
    file = folder / "stage_1.py"
    old = 'return torch.relu(self.body["step"](h))'
    assert old in file.read_text()
    new = f"assert not (h > 1e6).any(), 'too large'\n        {old}"
    file.write_text(file.read_text().replace(old, new))
    return load(folder)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("run", ["step", "call"])
def test_a_stages_exception_names_stage_micro_batch_and_line(tmp_path, run, schedule):
    pipe = _failing(tmp_path, schedule)
    good = CHAIN.inputs()
    bad = good[0].clone()
    bad[6] = 1e12
    for _ in range(3):
        with pytest.raises(StageError) as error:
            pipe.step(bad, loss_fn=mean_loss) if run == "step" else pipe(bad)
        assert "stage 1 failed in 1F2, stage_1.py, line 13: `assert not" in str(error.value)
        assert isinstance(error.value.__cause__, AssertionError)
    model = CHAIN.model().double()
    model.load_state_dict(pipe.state_dict())
    pipe.zero_grad()
    pipe.step(*good, loss_fn=mean_loss)
    plain_step(CHAIN, model, good, 4)
    assert_same_state(pipe, model)


@pytest.mark.parametrize(
    ("schedule", "mode", "receives", "says"),
    [
        ("1f1b", "never", True, "stage 1 failed in 1B0: ValueError: no gradient"),
        ("1f1b", "always", True, "stage 1 failed in 1B0: ValueError: no gradient"),
        ("split", "never", True, "stage 1 failed in 1I0: ValueError: no gradient"),
        ("split", "never", False, "stage 1 failed in 1W0: ValueError: no gradient"),
    ],
)
def test_an_exception_in_backward_names_the_action(tmp_path, schedule, mode, receives, says):
    model, pipe = both(tmp_path, CHAIN, schedule=schedule, checkpoint=mode)

    def refuse(gradient):
        raise ValueError("no gradient")

    def hook(module, inputs, output):
        if output.requires_grad and receives:
            output.register_hook(refuse)

    parameter = next(pipe._stages[1].module.parameters())
    refusing = parameter.register_hook(refuse) if not receives else None
    watching = pipe._stages[1].module.register_forward_hook(hook)
    with pytest.raises(StageError, match=says):
        pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    watching.remove()
    if refusing is not None:
        refusing.remove()
    pipe.zero_grad()
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    plain_step(CHAIN, model, CHAIN.inputs(), 4)
    assert_same_state(pipe, model)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_lane_runs_its_row_in_order(tmp_path, schedule):
    """Seen by hooks of a stage's module, of the gradient of what it gave and of its weight's."""
    _, pipe = both(tmp_path, CHAIN, schedule=schedule)
    seen, forwards, given = [], iter(range(4)), []

    def forward(module, inputs, output):
        i = next(forwards)
        seen.append(f"1F{i}")
        output.register_hook(lambda gradient: given.append(i))
        output.register_hook(lambda gradient: seen.append(f"1{'BI'[schedule == 'split']}{i}"))

    def weight(gradient):
        if schedule == "split":
            seen.append(f"1W{given.pop(0)}")

    pipe._stages[1].module.register_forward_hook(forward)
    next(pipe._stages[1].module.parameters()).register_hook(weight)
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    assert seen == [str(action) for action in pipe._schedule.rows[1]]


def test_an_exception_in_loss_fn_names_the_micro_batch(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    with pytest.raises(StageError, match="loss_fn failed on micro-batch 0: ZeroDivisionError"):
        pipe.step(*CHAIN.inputs(), loss_fn=lambda output, target: 1 / 0)
    with pytest.raises(InputError, match=r"one number .* returned a tensor of shape \[3, 3\]"):
        pipe.step(*CHAIN.inputs(), loss_fn=lambda output, target: output)
    for wrong, told in (
        (lambda output, target: (output.mean(), output), "a tuple$"),
        (lambda output, target: output.mean() * 1j, r"a tensor of shape \[\] torch.complex128$"),
        (lambda output, target: 1.5, "1.5$"),
    ):
        with pytest.raises(InputError, match=f"on micro-batch 0 it returned {told}"):
            pipe.step(*CHAIN.inputs(), loss_fn=wrong)
    for mode in ("no_grad", "inference_mode"):
        outside = pytest.raises(InputError, match=rf"outside of torch\.{mode}\(\)")
        with outside, getattr(torch, mode)():
            pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)


def test_a_step_of_what_is_all_frozen_says_so(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    pipe.requires_grad_(False)
    with pytest.raises(InputError, match="no parameter of the pipeline that it depends on require"):
        pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)


@pytest.mark.parametrize("call", ["forward", "step"])
def test_a_call_from_within_a_step_is_refused_as_it_would_wait_for_itself(tmp_path, call):
    model, pipe = both(tmp_path, CHAIN)

    def again(output, target):
        if call == "step":
            pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
        with torch.no_grad():
            return mean_loss(output - pipe(*CHAIN.inputs()))

    with pytest.raises(StageError, match=r"micro-batch 0: InputError: .* called while it runs"):
        pipe.step(*CHAIN.inputs(), loss_fn=again)
    pipe.zero_grad()
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    plain_step(CHAIN, model, CHAIN.inputs(), 4)
    assert_same_state(pipe, model)


def test_an_interrupt_ends_the_call_and_leaves_the_pipeline_usable(tmp_path):
    model, pipe = both(tmp_path, CHAIN)
    began = threading.Event()

    def slow(output, target):
        began.set()
        time.sleep(0.05)
        return mean_loss(output)

    def interrupt():
        began.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # A shell lets what it starts in the background ignore the signal: ask for Python's handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pipe.step(*CHAIN.inputs(), loss_fn=slow)
    finally:
        helper.join()
        signal.signal(signal.SIGINT, before)
    pipe.zero_grad()
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    plain_step(CHAIN, model, CHAIN.inputs(), 4)
    assert_same_state(pipe, model)


def test_lanes_hand_python_over_often_and_leave_the_callers_interval_alone(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    found = []
    pipe._stages[1].module.register_forward_hook(lambda *_: found.append(sys.getswitchinterval()))
    before = sys.getswitchinterval()
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    assert max(found) <= 5e-4 < before == sys.getswitchinterval()


def test_lanes_leave_the_callers_kernels_of_attention_alone():
    """What each of two lanes set, the other would put back."""
    before, lanes = kernels_in_order(), Lanes([CPU, CPU])
    entered, left = threading.Event(), threading.Event()

    def first():
        with sdpa_kernel(SDPBackend.MATH):
            assert entered.wait(10)
        left.set()

    def second():
        while kernels_in_order() == before:
            time.sleep(1e-3)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            entered.set()
            assert left.wait(10)

    lanes.run([first, second], lambda: None)
    assert kernels_in_order() == before


def test_lanes_work_at_the_same_time():
    """Each of two lanes waits for the other's op of the same moment: one at a time would hang."""
    lanes = Lanes([CPU, CPU])
    barrier = threading.Barrier(2, timeout=10)
    lanes.run([barrier.wait, barrier.wait], lambda: None)


def test_autocast_reaches_stages_and_recomputation(tmp_path):
    x = CHAIN.inputs()[0].float()
    gradients = []
    for mode in ("never", "always"):
        _, pipe = both(tmp_path, CHAIN, checkpoint=mode)
        pipe.float()
        with torch.autocast("cpu", torch.bfloat16):
            output = pipe(x)
            assert output.dtype == torch.bfloat16
            output.float().pow(2).mean().backward()
        gradients.append([p.grad for p in pipe.parameters()])
    # A cast cached without grad in the first forward would leave None here.
    assert all(gradient is not None for gradient in gradients[1])
    for never, always in zip(*gradients, strict=True):
        torch.testing.assert_close(never, always, rtol=0.05, atol=1e-4)
