"""Random numbers belong to the micro-batch, whatever the stages, the schedule and recomputation."""

import copy
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch._dynamo.convert_frame import compile_lock
from torch.nn import functional as F
from toys import CHAIN, MODES, NOISY, SCHEDULES, both, mean_loss, same

from fxpipe.runtime import drawing as drawing_module
from fxpipe.runtime.drawing import Draws, drawing
from fxpipe.runtime.random import Numbers, RandomStream, borrowed, microbatch_seeds

CPU = torch.device("cpu")


def _attend(x):
    q = x.unflatten(1, (2, 4))
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)


OPS = {
    "F.dropout": lambda x: F.dropout(x, 0.4),
    "in-place dropout": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "nn.Dropout2d": lambda x: torch.nn.Dropout2d(0.5)(x[None, :, :, None]),
    "attention": _attend,
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(8, dtype=x.dtype),
    "multinomial": lambda x: x + torch.multinomial(torch.ones(8), 8).to(x.dtype),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_a_stream_draws_what_manual_seed_gives_and_leaves_torchs_generator_alone(op, dtype):
    x = torch.linspace(-1, 1, 32, dtype=dtype).view(4, 8)
    torch.manual_seed(7)
    expected = [OPS[op](x), OPS[op](x)]
    before = torch.manual_seed(99).get_state()
    with drawing(RandomStream(7), CPU) as first:
        one = OPS[op](x)
    # The second half on another stage: the stream is handed on.
    with drawing(first.end, CPU):
        two = OPS[op](x)
    assert torch.equal(one, expected[0])
    assert torch.equal(two, expected[1])
    assert torch.equal(torch.get_rng_state(), before)


class Op(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x):
        return self.op(x)


@pytest.mark.parametrize("op", OPS)
def test_a_modules_later_forwards_draw_what_its_first_did(op):
    module, x = Op(OPS[op]), torch.linspace(-1, 1, 32).view(4, 8)
    torch.manual_seed(99)
    before, found = torch.get_rng_state(), []
    for training in (False, True, True, False):
        module.train(training)
        with drawing(RandomStream(7), CPU, module) as mode:
            found.append(module(x))
        torch.manual_seed(7)
        assert torch.equal(found[-1], module(x))
        assert torch.equal(mode.end.state(CPU), torch.get_rng_state())
        torch.set_rng_state(before)


def test_after_the_first_forward_only_functions_that_draw_are_looked_into():
    seen = []

    class Seen(Draws):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return super().__torch_dispatch__(func, types, args, kwargs)

    module, x = Op(lambda x: F.dropout(F.gumbel_softmax(x - 1)) + 1), torch.ones(4)
    with mock.patch("fxpipe.runtime.drawing.Draws", Seen):
        for _ in range(2):
            seen.clear()
            with drawing(RandomStream(7), CPU, module):
                module(x)
    assert any("exponential_" in op for op in seen)
    assert not any("sub" in op or "bernoulli" in op for op in seen)


def test_attention_that_draws_is_not_looked_into_and_holds_up_none_that_does_not():
    swaps, looks = [], []

    class Seen(Draws):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            looks.append(str(func))
            return super().__torch_dispatch__(func, types, args, kwargs)

        def run(self, op):
            swaps.append(op)
            return super().run(op)

    def attend(x, dropout, how):
        attention = F.scaled_dot_product_attention
        return attention(x, x, x, None, dropout) if how else attention(x, x, x, dropout_p=dropout)

    x = torch.ones(1, 2, 4, 4)
    for dropout, n_swaps in ((0.3, 1), (0.0, 0)):
        for how in (False, True):
            module = Op(lambda x, dropout=dropout, how=how: F.dropout(attend(x, dropout, how)))
            with mock.patch("fxpipe.runtime.drawing.Draws", Seen):
                for _ in range(2):
                    looks.clear(), swaps.clear()
                    with drawing(RandomStream(7), CPU, module):
                        module(x)
            assert (len(swaps), looks) == (1 + n_swaps, [])


def test_what_no_function_of_torchs_draws_is_looked_for_in_each_forward():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.ops.aten.bernoulli(x, 0.5)

    module, x = Op(Own.apply), torch.ones(64)
    found = []
    for _ in range(3):
        with drawing(RandomStream(7), CPU, module):
            found.append(module(x))
    assert all(torch.equal(each, found[0]) for each in found)


def test_a_stream_can_be_begun_again():
    start = RandomStream(3)
    with drawing(start, CPU):
        one = torch.rand(3)
    with drawing(start, CPU):
        two = torch.rand(3)
    assert torch.equal(one, two)


@pytest.mark.parametrize("run", ["step", "call"])
def test_recompute_draws_the_same_masks_whatever_mode_and_schedule(tmp_path, run):
    x = NOISY.inputs()
    gradients = []
    for mode in MODES:
        for schedule in SCHEDULES:
            _, pipe = both(tmp_path, NOISY, schedule=schedule, checkpoint=mode)
            torch.manual_seed(11)
            if run == "step":
                pipe.step(*x, loss_fn=mean_loss)
            else:
                mean_loss(pipe(*x)).backward()
            gradients.append([p.grad for p in pipe.parameters()])
    for each in gradients[1:]:
        assert all(map(same, each, gradients[0]))


def test_a_call_takes_one_seed_per_micro_batch_from_torchs_generator(tmp_path):
    _, pipe = both(tmp_path, NOISY)
    torch.manual_seed(4)
    microbatch_seeds(4)
    expected = torch.get_rng_state()
    torch.manual_seed(4)
    pipe(*NOISY.inputs())
    assert torch.equal(torch.get_rng_state(), expected)


def test_without_random_stages_and_in_loading_the_generator_is_untouched(tmp_path):
    before = torch.get_rng_state()
    with torch.random.fork_rng():
        _, pipe = both(tmp_path, CHAIN)
    pipe.step(*CHAIN.inputs(), loss_fn=mean_loss)
    pipe(*CHAIN.inputs())
    assert torch.equal(torch.get_rng_state(), before)


class Layers(torch.nn.Module):
    """Layers that draw, of which one is used twice, and a function that may."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Dropout(0.4), torch.nn.RReLU()
        self.p = 0.0

    def forward(self, x):
        x = self.second(self.first(self.first(x + 1) - 1))
        return F.dropout(x, self.p) if self.p else x


@pytest.mark.parametrize("elsewhere", [False, True])
def test_where_layers_alone_draw_no_function_is_looked_at(elsewhere):
    module, x = Layers(), torch.ones(4)
    module.p = 0.5 * elsewhere
    with mock.patch("fxpipe.runtime.drawing._Functions", wraps=drawing_module._Functions) as looks:
        for _ in range(3):
            with drawing(RandomStream(7), CPU, module):
                module(x)
    assert looks.call_count == 2 * elsewhere


@pytest.mark.parametrize("training", [True, False])
def test_layers_draw_from_the_stream_and_elsewhere_from_torchs_generator(training):
    module, x = Layers().train(training), torch.linspace(-1, 1, 32)
    for _ in range(3):
        before = torch.manual_seed(99).get_state()
        with drawing(RandomStream(7), CPU, module) as mode:
            found = module(x)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(7)
        assert torch.equal(found, module(x))
        assert torch.equal(mode.end.state(CPU), torch.get_rng_state())


def test_a_layer_that_fails_lets_others_draw():
    module = Layers()

    def refuse(layer, given):
        if not isinstance(given[0], torch.Tensor):
            raise TypeError

    module.second.register_forward_pre_hook(refuse)  # before those that draw begin
    for _ in range(2):
        with drawing(RandomStream(7), CPU, module):
            module(torch.ones(4))
    before = torch.get_rng_state()
    for layer in (module.first, module.second):
        with pytest.raises(TypeError), drawing(RandomStream(7), CPU, module):
            layer("no tensor")
    assert torch.equal(torch.get_rng_state(), before)
    with drawing(RandomStream(7), CPU, module):
        module(torch.ones(4))


def test_a_copy_of_a_module_draws_once_for_each_layer():
    module, x = Layers(), torch.ones(4)
    for _ in range(2):
        with drawing(RandomStream(7), CPU, module):
            module(x)
    twin = copy.deepcopy(module)
    for n_learning in (1, 0):
        with drawing(RandomStream(7), CPU, twin):
            assert len(twin.first._forward_pre_hooks) == 1 + n_learning
            twin(x)


def test_a_forward_whose_calls_are_not_fixed_is_looked_at_each_time():
    module, x = Layers(), torch.ones(64)
    for p in (0.0, 0.0, 0.5):
        module.p = p
        before = torch.get_rng_state()
        with drawing(RandomStream(7), CPU, module, fixed=False):
            module(x)
        assert torch.equal(torch.get_rng_state(), before)


def test_two_blocks_of_one_thread_draw_each_from_its_own():
    """As where a segment is computed again while another stage's forward runs."""
    module, x = Layers(), torch.linspace(-1, 1, 32)
    with drawing(RandomStream(7), CPU, module):
        expected = module(x)
    with drawing(RandomStream(7), CPU, module), drawing(RandomStream(8), CPU, module):
        other = module(x)
    with drawing(RandomStream(7), CPU, module):
        with drawing(RandomStream(8), CPU, module):
            module(x)
        found = module(x)
    assert torch.equal(found, expected)
    assert not torch.equal(other, expected)


def test_nothing_is_compiled_on_another_lane_while_one_draws():
    """It puts torch's generators back as they stood when it began, in the middle of the draw."""
    numbers = Numbers(RandomStream(7))
    with ThreadPoolExecutor(1) as lane:

        def can_compile():
            free = compile_lock.acquire(blocking=False)
            if free:
                compile_lock.release()
            return free

        numbers.take([CPU])
        assert not lane.submit(can_compile).result()
        assert can_compile()
        numbers.give_back()
        assert lane.submit(can_compile).result()
        with borrowed(RandomStream(7)):  # as a closure, which has a thread of its own, may
            assert lane.submit(can_compile).result()
