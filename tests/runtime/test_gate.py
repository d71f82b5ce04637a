"""What is sent to a lane waits until there is room, as the plan says."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.runtime.gate import Gate, needs
from fxpipe.runtime.mailbox import StoppedError
from fxpipe.runtime.manifest import EstimateSpec
from fxpipe.schedule import Schedule

TABLE = Schedule.from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
ESTIMATE = EstimateSpec(
    9.0,
    0.0,
    (1, 1),
    timeline=tuple(", ".join(f"{action} 0.0 1.0" for action in row) for row in TABLE.rows),
    waits=("0F2 1B0", "1B2 0B1"),
)


def test_what_is_waited_for_is_counted_in_actions_that_have_ended() -> None:
    assert needs(ESTIMATE, TABLE, 3) == {(0, True, 2, 1): 2, (1, False, 2, 0): 5}


def test_of_fewer_micro_batches_there_are_fewer_actions() -> None:
    waits = replace(ESTIMATE, waits=("0F1 1B2", "1B1 0F2"))
    assert needs(waits, TABLE, 2) == {(0, True, 1, 1): 4, (1, False, 1, 0): 2}


def test_a_table_that_was_changed_is_not_waited_in() -> None:
    first, *others = TABLE.rows[0]
    assert needs(ESTIMATE, Schedule(((*others, first), TABLE.rows[1])), 3) == {}


def test_who_waits_goes_on_once_the_other_has_ended_so_much() -> None:
    gate, went = Gate({(0, True, 2, 1): 2}, 2), threading.Event()

    def wait() -> None:
        gate.wait(0, True, 2, 1)
        went.set()

    gate.wait(0, True, 1, 1)
    thread = threading.Thread(target=wait)
    thread.start()
    gate.passed(1)
    assert not went.wait(0.05)
    gate.passed(1)
    thread.join(10)
    assert went.is_set()


def test_who_waits_is_stopped_with_the_step() -> None:
    gate = Gate({(0, True, 2, 1): 2}, 2)
    threading.Timer(0.05, gate.stop).start()
    with pytest.raises(StoppedError):
        gate.wait(0, True, 2, 1)


class Narrows(nn.Module):
    """Its largest value is gone as soon as the second half has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 9000))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x) * 2)[:, :8])


def test_a_lane_that_is_slow_holds_no_more_than_predicted(tmp_path) -> None:
    model, x, slow = Narrows(), torch.randn(24, 8), [0.0]

    def loss(output: Tensor, _: object) -> Tensor:
        time.sleep(slow[0])
        return output.square().mean()

    setting = {"devices": "cpu*2", "microbatches": 6, "schedule": "gpipe", "loss_fn": loss}
    measured = fxpipe.compile(model, (x,), **setting).profile
    costs = {
        name: replace(cost, forward_ms=1.0, backward_ms=2.0)
        for name, cost in measured.costs.items()
    }
    package = fxpipe.compile(model, (x,), profile=replace(measured, costs=costs), **setting)
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    pipe.step(x, loss_fn=loss)
    slow[0] = 0.03
    with pipe.memory() as memory:
        pipe.step(x, loss_fn=loss)
    for peak in memory.peaks:
        assert peak.measured_bytes <= peak.predicted_bytes
    whole = Narrows()
    whole.load_state_dict(model.state_dict())
    loss(whole(x), None).backward()
    pipe.zero_grad()
    pipe.step(x, loss_fn=loss)
    for (name, found), (_, wanted) in zip(
        sorted(pipe.named_parameters()), sorted(whole.named_parameters()), strict=True
    ):
        torch.testing.assert_close(found.grad, wanted.grad, msg=name)
