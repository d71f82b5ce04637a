"""Runner: the user's closure, once per micro-batch, pipelined where it calls the pipeline."""

import threading

import pytest
import torch
from programs import Program, plain
from torch import nn
from toys import CHAIN, NOISY, TIED, TOYS, assert_same_state, both, mean_loss, rows, same

from fxpipe.errors import InputError, StageError
from fxpipe.runtime import Runner
from fxpipe.runtime.random import microbatch_seeds
from fxpipe.schedule import Schedule, clock_order

M = 4


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["chain", "tied", "noisy", "normed"])
def test_a_closure_gives_what_it_gives_without_a_pipeline(name, schedule, checkpoint, tmp_path):
    toy = TOYS[name]
    model, pipe = both(tmp_path, toy, m=M, schedule=schedule, checkpoint=checkpoint)
    expected, program = Program(model, toy), Program(pipe, toy)
    inputs = toy.inputs()
    torch.manual_seed(5)
    losses = plain(expected, toy, inputs, M)
    torch.manual_seed(5)
    runner = Runner(M)
    found = runner.step(lambda *piece: program(*piece, share=runner.share), *inputs)
    assert all(same(a, b) for a, b in zip(found, losses, strict=True))
    assert_same_state(pipe, model)
    assert_same_state(program, expected)
    assert all(parameter.grad is None for parameter in program.after.parameters())


def test_a_schedule_runs_clock_cycle_by_clock_cycle():
    table = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    order = [str(action) for action in clock_order(table)]
    assert order == ["0F0", "0F1", "1F0", "1B0", "0B0", "1F1", "1B1", "0B1"]


def test_side_effects_happen_once_per_microbatch_in_the_schedules_order(tmp_path):
    _, pipe = both(tmp_path, CHAIN, m=6, schedule="1f1b")
    runner, seen, names = Runner(6), [], {"rows": list("abcdefghij"), "tag": "t"}

    def closure(x, info):
        assert info["tag"] == "t"
        i = "acegij".index(info["rows"][0])
        seen.append(f"before {i}")
        loss = pipe(x).pow(2).mean()
        seen.append(f"after {i}")
        loss.backward()
        return info["rows"]

    runs = []
    for _ in range(3):
        seen.clear()
        results = runner.step(closure, *CHAIN.inputs(), names)
        runs.append(tuple(seen))
    assert results == [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"], ["i"], ["j"]]
    assert len(set(runs)) == 1
    for part in ("before", "after"):
        assert [s for s in seen if s.startswith(part)] == [f"{part} {i}" for i in range(6)]
    # Several micro-batches are in the pipeline at a time, no more than the schedule asks for.
    assert seen.index("before 1") < seen.index("after 0") < seen.index("before 5")


def test_a_closure_may_train_another_pipeline_which_draws(tmp_path):
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    (_, pipe), (_, other) = (both(f, t, m=M) for f, t in zip(folders, (CHAIN, NOISY), strict=True))
    given, drawn = NOISY.inputs(), []

    def closure(x):
        other.step(*given, loss_fn=mean_loss)
        drawn.append(torch.rand(()))
        pipe(x).mean().backward()

    torch.manual_seed(5)
    Runner(M).step(closure, *CHAIN.inputs())
    torch.manual_seed(5)
    for seed, found in zip(microbatch_seeds(M), drawn, strict=True):
        torch.manual_seed(seed)
        microbatch_seeds(M)  # the other's, for its own step
        assert torch.equal(found, torch.rand(()))


@pytest.mark.parametrize("where", ["before", "after", "stage"])
def test_an_exception_reaches_the_caller_and_all_can_go_on(where, tmp_path):
    _, pipe = both(tmp_path, CHAIN, m=M)
    runner, calls = Runner(M), []

    def closure(x, failing):
        calls.append(None)
        if where == "before" and len(calls) == failing:
            raise KeyError("mine")
        y = pipe(x[:, :5] if where == "stage" and len(calls) == failing else x)
        if where == "after" and len(calls) >= failing:
            raise KeyError("mine")
        y.mean().backward()

    (x,) = CHAIN.inputs()
    before = threading.active_count()
    with pytest.raises(InputError if where == "stage" else KeyError):
        runner.step(closure, x, 3)
    calls.clear()
    assert runner.step(closure, x, 99) == [None] * M
    assert threading.active_count() <= before + 3  # the lanes, kept


def test_a_failing_stage_ends_all_closures(tmp_path):
    _, pipe = both(tmp_path, CHAIN, m=M)
    pipe.body.step.weight.data = torch.zeros(2, 2, dtype=torch.float64)
    ended = []

    def closure(x):
        try:
            pipe(x).mean().backward()
        finally:
            ended.append(len(x))

    with pytest.raises(StageError, match="stage 1 failed in 1F0"):
        Runner(M).step(closure, *CHAIN.inputs())
    assert len(ended) in (2, 3, 4)


def test_a_closure_that_calls_again_as_it_ends_ends_too(tmp_path):
    _, pipe = both(tmp_path, CHAIN, m=M)
    calls, raised = [], []

    def closure(x):
        calls.append(None)
        if len(calls) == 3:
            raise KeyError("mine")
        try:
            pipe(x).mean().backward()
        finally:
            pipe(x)

    def step():
        with pytest.raises(KeyError, match="mine") as error:
            Runner(M).step(closure, *CHAIN.inputs())
        raised.append(error.value)

    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    thread.join(60)
    assert raised


@pytest.mark.parametrize("begins", ["never", "before", "after"])
def test_an_interrupt_as_a_closure_begins_is_one_and_ends_all(begins, tmp_path, monkeypatch):
    _, pipe = both(tmp_path, CHAIN, m=M)
    start, calls, interrupted = threading.Thread.start, [], []

    def start_or_not(thread):
        if thread.name != "fxpipe closure" or not calls:
            return start(thread)
        interrupted.append(thread)
        if begins == "before":
            start(thread)
        # The thread may begin after the step has ended, as the system takes its time.
        raise KeyboardInterrupt

    def closure(x):
        calls.append(None)
        pipe(x).mean().backward()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_not)
        with pytest.raises(KeyboardInterrupt):
            Runner(M).step(closure, *CHAIN.inputs())
    (thread,) = interrupted
    if begins == "after":
        start(thread)
        thread.join(60)
    assert not thread.is_alive()
    assert len(calls) == 1
    assert Runner(M).step(closure, *CHAIN.inputs()) == [None] * M


def test_a_second_interrupt_leaves_no_closure_waiting(tmp_path, monkeypatch):
    _, pipe = both(tmp_path, CHAIN, m=M)
    left = []

    def interrupt(_thread):
        raise KeyboardInterrupt

    def closure(x):
        left[:] = [t for t in threading.enumerate() if t.name == "fxpipe closure"]
        if len(left) == 3:
            raise KeyboardInterrupt
        pipe(x).mean().backward()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Runner(M).step(closure, *CHAIN.inputs())
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)


def test_without_gradients_it_only_goes_forward(tmp_path):
    model, pipe = both(tmp_path, NOISY, m=M)
    (x,) = NOISY.inputs()
    with torch.no_grad():
        torch.manual_seed(1)
        found = Runner(M).step(lambda piece: pipe(piece), x)
        torch.manual_seed(1)
        for seed, piece, output in zip(
            microbatch_seeds(M), x.split(rows(len(x), M)), found, strict=True
        ):
            torch.manual_seed(seed)
            assert same(output, model(piece))


def test_backward_may_be_called_more_than_once(tmp_path):
    model, pipe = both(tmp_path, TIED, m=M)
    (x,) = TIED.inputs()

    def closure(piece, model=pipe):
        output = model(piece)
        output.mean().backward(retain_graph=True)
        output.pow(2).mean().backward()

    Runner(M).step(closure, x)
    for piece in x.split(rows(len(x), M)):
        closure(piece, model)
    assert_same_state(pipe, model)


def test_a_way_past_the_pipeline_needs_the_graph_twice(tmp_path):
    model, pipe = both(tmp_path, CHAIN, m=M)
    before = nn.Linear(6, 6).double()
    (x,) = CHAIN.inputs()

    def closure(piece, model=pipe, retain=True):
        given = before(piece).tanh()
        (model(given).mean() + given.mean()).backward(retain_graph=retain)

    with pytest.raises(InputError, match="retain_graph=True"):
        Runner(M).step(lambda piece: closure(piece, retain=False), x)
    pipe.zero_grad()
    before.zero_grad()
    Runner(M).step(closure, x)
    found = before.weight.grad.clone()
    before.zero_grad()
    for piece in x.split(rows(len(x), M)):
        closure(piece, model)
    assert same(found, before.weight.grad)
    assert_same_state(pipe, model)


def test_autocast_inside_the_closure_is_the_stages_too(tmp_path):
    _, pipe = both(tmp_path, CHAIN, m=M)
    pipe.float()
    dtypes = []

    def closure(x):
        with torch.autocast("cpu", torch.bfloat16):
            dtypes.append(pipe(x).dtype)

    Runner(M).step(closure, CHAIN.inputs()[0].float())
    assert dtypes == [torch.bfloat16] * M


def twice(pipe):
    return lambda x: pipe(pipe(x)[:, :1].expand(-1, 6))


@pytest.mark.parametrize(
    ("m", "make", "says"),
    [
        (M, lambda pipe: lambda x: x, "called no pipeline"),
        (M, twice, "called a pipeline twice"),
        (3, lambda pipe: pipe, "compiled for 4 micro-batches, the runner cuts 3"),
        (0, lambda pipe: pipe, "at least one"),
    ],
)
def test_wrong_use_is_told(m, make, says, tmp_path):
    _, pipe = both(tmp_path, CHAIN, m=M)
    with pytest.raises(InputError, match=says):
        Runner(m).step(make(pipe), *CHAIN.inputs())
    assert pipe(*CHAIN.inputs()).shape == (10, 3)
