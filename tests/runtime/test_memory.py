"""Nothing of a step outlives it, and within it nothing outlives its last use."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from toys import MODES, SKIPS, TOYS, Part, Toy, both, mean_loss

from fxpipe.errors import StageError


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


@pytest.fixture(autouse=True)
def _without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TOYS)
def test_no_tensor_of_a_step_or_call_is_alive_after_it(tmp_path, name, mode):
    toy = TOYS[name]
    _, pipe = both(tmp_path, toy, schedule="1f1b", checkpoint=mode)
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


def test_a_portal_lets_go_of_its_value_after_the_last_consumer(tmp_path):
    _, pipe = both(tmp_path, LIGHT)
    watch = Watch(pipe)
    alive = []

    def loss_fn(output, target):
        alive.append((watch.alive(0), watch.alive(1)))
        return output.mean()

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
