"""GPipe computes what the Sequential does, and behaves as torchgpipe's."""

import copy
import gc
import signal
import threading
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxpipe.compat import GPipe, is_checkpointing, is_recomputing
from fxpipe.errors import StageError

MODES = ["always", "except_last", "never"]


class Pair(nn.Module):
    """A pair of tensors in, another out: one of whole numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair):
        x, chosen = pair
        return self.linear(x) * (chosen > 0), chosen + 1


def chain():
    torch.manual_seed(0)
    layers = [
        nn.Linear(4, 8),
        nn.Tanh(),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        nn.Linear(8, 2),
    ]
    return nn.Sequential(*layers).double()


def batch(rows=10, size=4):
    return torch.randn(rows, size, dtype=torch.float64)


def on_cpu(model, balance, **settings):
    return GPipe(model, balance, devices=["cpu"] * len(balance), **settings)


def assert_equal_steps(model, pipe, x):
    """Equal outputs, and equal gradients of parameters and inputs."""
    xs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(x) for module, x in zip((model, pipe), xs, strict=True)]
    torch.testing.assert_close(outputs[0], outputs[1])
    for module, output in zip((model, pipe), outputs, strict=True):
        module.zero_grad()
        output.square().sum().backward()
    torch.testing.assert_close(xs[0].grad, xs[1].grad)
    for one, other in zip(model.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 1, 1]], ids=str)
def test_outputs_and_gradients_are_those_of_the_sequential(balance, checkpoint):
    model = chain()
    pipe = on_cpu(copy.deepcopy(model), balance, chunks=4, checkpoint=checkpoint)
    for rows in (8, 10, 3, 1):
        assert_equal_steps(model, pipe, batch(rows))


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference_mode"])
def test_nothing_is_checkpointed_without_training_or_gradients(mode):
    seen = []
    model = chain()
    model[1].register_forward_hook(lambda *_: seen.append(is_checkpointing()))
    pipe = on_cpu(model, [2, 2], chunks=2, checkpoint="always").train(mode != "eval")
    with nullcontext() if mode == "eval" else getattr(torch, mode)():
        output = pipe(batch())
    assert output.requires_grad == (mode == "eval")
    assert seen == [False, False]


@pytest.mark.parametrize("checkpoint", MODES)
def test_tuples_pass_with_tensors_that_have_no_gradient(checkpoint):
    model = nn.Sequential(Pair(), Pair()).double()
    pipe = on_cpu(copy.deepcopy(model), [1, 1], chunks=3, checkpoint=checkpoint)
    x, chosen = batch(), torch.randint(-1, 2, (10, 1))
    for one, other in zip(model((x, chosen)), pipe((x, chosen)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    model((x, chosen))[0].sum().backward()
    pipe((x, chosen))[0].sum().backward()
    for one, other in zip(model.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_tensors_of_different_rows_are_refused():
    pipe = on_cpu(nn.Sequential(Pair()).double(), [1], chunks=4)
    with pytest.raises(RuntimeError, match=r"different number of chunks.*1 and 4, of 10, 1 rows"):
        pipe((batch(), torch.ones(1, 1)))


def test_flags_tell_the_two_forwards_apart():
    seen = []

    class Seen(nn.Module):
        def forward(self, x):
            seen.append((is_checkpointing(), is_recomputing()))
            return x

    x = batch(4).requires_grad_()
    on_cpu(nn.Sequential(Seen()), [1], chunks=2, checkpoint="except_last")(x).sum().backward()
    assert seen == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize("checkpoint", MODES)
def test_backward_takes_micro_batches_in_the_opposite_order(checkpoint):
    order = []

    class Logged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name, int(x[0, 0])
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            order.append(ctx.name)
            return gradient, None

    class Log(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            return Logged.apply(x, self.name)

    pipe = on_cpu(nn.Sequential(Log("a"), Log("b")), [1, 1], chunks=3, checkpoint=checkpoint)
    x = torch.arange(3.0).reshape(3, 1).requires_grad_()
    pipe(x).sum().backward()
    for name in ("a", "b"):
        assert [i for other, i in order if other == name] == [2, 1, 0]


@pytest.mark.parametrize("checkpoint", MODES)
def test_recomputed_dropout_drops_the_same(checkpoint):
    class Drop(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, training=True)

    pipe = on_cpu(nn.Sequential(Drop(), Drop()), [1, 1], chunks=4, checkpoint=checkpoint)
    x = torch.ones(8, 50, requires_grad=True)
    torch.manual_seed(3)
    output = pipe(x)
    output.sum().backward()
    assert torch.equal(output, x.grad)
    torch.manual_seed(3)
    assert torch.equal(pipe(x), output)
    # Other partitions draw the same.
    torch.manual_seed(3)
    assert torch.equal(on_cpu(nn.Sequential(Drop(), Drop()), [2], chunks=4)(x), output)


def test_a_model_without_random_numbers_leaves_the_generator_alone():
    pipe = on_cpu(chain(), [2, 2], chunks=2)
    x = batch()
    torch.manual_seed(5)
    pipe(x)
    found = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), found)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_dropout_that_is_switched_on_later_is_recomputed_too(checkpoint):
    layers = [nn.Dropout(0.0), nn.Linear(50, 50, bias=False), nn.Dropout(0.0)]
    pipe = on_cpu(nn.Sequential(*layers), [1, 2], chunks=4, checkpoint=checkpoint)
    nn.init.eye_(layers[1].weight)
    for p in (0.0, 0.0, 0.5, 0.5):
        layers[0].p = layers[2].p = p
        x = torch.ones(8, 50, requires_grad=True)
        output = pipe(x)
        output.sum().backward()
        assert torch.equal(output, x.grad)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_autocast_is_the_callers_in_every_forward(checkpoint):
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            seen.append(output.dtype)
            return output

    pipe = on_cpu(nn.Sequential(Seen(4, 4), Seen(4, 4)), [1, 1], chunks=2, checkpoint=checkpoint)
    with torch.autocast("cpu", torch.bfloat16):
        output = pipe(torch.randn(4, 4))
    output.float().sum().backward()
    assert set(seen) == {torch.bfloat16}
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@pytest.mark.parametrize("checkpoint", MODES)
def test_tensors_that_are_no_parameters_get_their_gradient(checkpoint):
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)

    class Outside(nn.Module):
        def forward(self, x):
            return x * weight

    x = batch()
    on_cpu(nn.Sequential(Outside()), [1], chunks=3, checkpoint=checkpoint)(x).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0))


def test_writing_an_input_without_gradient_in_place_is_refused_where_it_is_computed_again():
    class Add(nn.Module):
        def forward(self, x):
            return x.add_(1)

    with pytest.raises(StageError, match="partition 0 writes its input in place"):
        on_cpu(nn.Sequential(Add()), [1], checkpoint="always")(batch())
    x = batch()
    expected = x + 1
    assert torch.equal(on_cpu(nn.Sequential(Add()), [1], checkpoint="never")(x), expected)


def test_each_micro_batch_writes_its_rows_alone_in_place():
    layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)).double()
    x = batch()
    layers(x.clone()).sum().backward()
    expected = layers[1].weight.grad.clone()
    layers.zero_grad()
    on_cpu(layers, [2], chunks=3, checkpoint="never")(x).sum().backward()
    torch.testing.assert_close(layers[1].weight.grad, expected)


class OwnError(Exception):
    pass


class Fails(nn.Module):
    def __init__(self, microbatch):
        super().__init__()
        self.microbatch = microbatch

    def forward(self, x):
        if int(x[0, 0]) == self.microbatch:
            raise OwnError("no")
        return x * 1


def test_an_error_keeps_its_type_says_where_and_leaves_the_pipe_usable():
    layers = [nn.Identity(), Fails(1), nn.Identity()]
    pipe = on_cpu(nn.Sequential(*layers), [1, 1, 1], chunks=4)
    x = torch.arange(4.0).reshape(4, 1).requires_grad_()
    for _ in range(3):
        with pytest.raises(OwnError, match="no") as caught:
            pipe(x)
        assert caught.value.__notes__ == ["in partition 1, micro-batch 1"]
    layers[1].microbatch = None
    pipe(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 1))


def test_lanes_end_with_the_clock_cycle_that_failed():
    begun = []
    failed = threading.Event()

    class Slow(nn.Module):
        def forward(self, x):
            begun.append(int(x[0, 0]))
            if begun[-1] == 1:
                assert failed.wait(10)
            return x

    class Last(nn.Module):
        def forward(self, x):
            failed.set()
            raise OwnError

    pipe = on_cpu(nn.Sequential(Slow(), Last()), [1, 1], chunks=4)
    with pytest.raises(OwnError):
        pipe(torch.arange(4.0).reshape(4, 1))
    # Micro-batch 1 is in the first partition in the cycle in which 0 is in the second.
    assert set(begun) <= {0, 1}


@pytest.fixture
def _interruptible():
    # A shell lets what it starts in the background ignore the signal: ask for Python's handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_ends_all_lanes_and_leaves_the_pipe_usable():
    begun = []

    class Interrupts(nn.Module):
        def forward(self, x):
            begun.append(int(x[0, 0]))
            if begun == [0]:
                time.sleep(0.1)  # the caller waits for the lanes by then
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.2)
            return x

    pipe = on_cpu(nn.Sequential(Interrupts(), nn.Identity()), [1, 1], chunks=4)
    x = torch.arange(4.0).reshape(4, 1)
    with pytest.raises(KeyboardInterrupt):
        pipe(x)
    assert begun == [0]
    assert torch.equal(pipe(x), x)


def test_an_error_in_recomputation_is_raised_by_backward():
    class Late(nn.Module):
        def forward(self, x):
            if is_recomputing():
                raise OwnError
            return x * 1

    pipe = on_cpu(nn.Sequential(Late()), [1], checkpoint="always")
    with pytest.raises(OwnError):
        pipe(batch().requires_grad_()).sum().backward()


@pytest.mark.parametrize("checkpoint", MODES)
def test_nothing_of_a_step_stays_alive(checkpoint):
    alive = []

    class Watched(nn.Module):
        def forward(self, x):
            output = x * 2
            alive.append(weakref.ref(output))
            return output

    layers = [nn.Linear(4, 4), Watched(), nn.Linear(4, 4), Watched()]
    pipe = on_cpu(nn.Sequential(*layers).double(), [2, 2], chunks=3, checkpoint=checkpoint)
    pipe(batch()).sum().backward()
    gc.collect()
    assert alive
    assert all(reference() is None for reference in alive)


class Counting(nn.Module):
    """Its output depends on a buffer that it writes, and on one that it replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("written", torch.ones(1, dtype=torch.float64))
        self.register_buffer("replaced", torch.ones(1, dtype=torch.float64))
        self.register_buffer("read", torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        self.written += 1
        self.replaced = self.replaced * 2
        return x * self.written.clone() * self.replaced * self.read


@pytest.mark.parametrize("checkpoint", MODES)
def test_buffers_are_written_once_and_recomputation_sees_them_as_they_were(checkpoint):
    model = nn.Sequential(Counting(), nn.BatchNorm1d(4)).double()
    plain = copy.deepcopy(model)
    pipe = on_cpu(model, [1, 1], chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        xs = [batch(12).requires_grad_() for _ in range(2)]
        xs[1].data.copy_(xs[0])
        torch.cat([plain(x) for x in xs[0].chunk(3)]).square().sum().backward()
        pipe(xs[1]).square().sum().backward()
        torch.testing.assert_close(xs[0].grad, xs[1].grad)
        for one, other in zip(plain.buffers(), pipe.buffers(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_batch_norm_that_was_frozen_at_first_counts_each_micro_batch_once(checkpoint):
    norm = nn.BatchNorm1d(4).double()
    plain = copy.deepcopy(norm)
    pipe = on_cpu(nn.Sequential(norm), [1], chunks=3, checkpoint=checkpoint)
    for frozen in (True, False, False):
        x = batch(12)
        for each in (norm, plain):
            each.train(not frozen)
        for piece in x.chunk(3):
            plain(piece)
        pipe(x).sum().backward()
        for one, other in zip(plain.buffers(), norm.buffers(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("checkpoint", MODES)
def test_deferred_batch_norm_sees_the_mini_batch(checkpoint):
    norm = nn.BatchNorm1d(4).double()
    settings = {"chunks": 4, "checkpoint": checkpoint, "deferred_batch_norm": True}
    pipe = on_cpu(nn.Sequential(copy.deepcopy(norm)), [1], **settings)
    for rows in (8, 11, 6):  # 6 rows make 3 micro-batches
        x = batch(rows)
        norm(x)
        pipe(x).sum().backward()
        torch.testing.assert_close(pipe[0].running_mean, norm.running_mean)
        torch.testing.assert_close(pipe[0].running_var, norm.running_var)
        assert pipe[0].num_batches_tracked == norm.num_batches_tracked
    names = {name.rpartition(".")[2] for name in pipe.state_dict()}
    assert names == {*norm.state_dict(), "sum", "sum_squares"}


def test_it_is_like_a_sequential_and_its_state_is_by_partition():
    model = chain()
    layers = list(model)
    pipe = on_cpu(model, [1, 3], chunks=2)
    assert len(pipe) == 4
    assert list(pipe) == layers
    assert pipe[-1] is layers[3]
    assert pipe.balance == [1, 3]
    assert pipe.devices == [torch.device("cpu")] * 2
    assert next(iter(pipe.state_dict())) == "partitions.0.0.weight"
    assert "partitions.1.2.0.weight" in pipe.state_dict()


def test_copies_run_on_their_own():
    pipe = on_cpu(chain(), [2, 2], chunks=2)
    x = batch()
    expected = pipe(x)
    assert torch.equal(copy.deepcopy(pipe)(x), expected)


def test_dtypes_may_change_devices_may_not():
    pipe = on_cpu(chain(), [2, 2])
    for move in (pipe.cpu, pipe.cuda, lambda: pipe.to("cpu"), lambda: pipe.to(device="cpu")):
        with pytest.raises(TypeError, match="GPipe should manage device placement"):
            move()
    assert pipe.to(torch.float32)(batch().float()).dtype == torch.float32


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (ValueError, {"balance": None}),
        (ValueError, {"balance": [3]}),
        (ValueError, {"balance": [4, 0]}),
        (ValueError, {"balance": [2, 2], "chunks": 0}),
        (ValueError, {"balance": [2, 2], "checkpoint": "sometimes"}),
        (IndexError, {"balance": [2, 2], "devices": ["cpu"]}),
    ],
    ids=str,
)
def test_wrong_arguments(error, settings):
    with pytest.raises(error):
        GPipe(chain(), **({"devices": ["cpu", "cpu"]} | settings))


@pytest.mark.parametrize("value", ["text", ("text",), [torch.ones(1)]], ids=str)
def test_only_tensors_and_tuples_of_them_pass(value):
    class Returns(nn.Module):
        def forward(self, x):
            return value

    pipe = on_cpu(nn.Sequential(Returns()), [1])
    with pytest.raises(TypeError, match="expected Tensor"):
        pipe(value)
    with pytest.raises(TypeError, match="expected Tensor"):
        pipe(torch.ones(1))
