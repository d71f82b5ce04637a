"""Pipelines in several threads, and in processes that were forked off, are as in one."""

import copy
import gc
import multiprocessing
import sys
import threading

import pytest
import torch
from toys import CHAIN, TIED, assert_same_state, both, mean_loss

from fxpipe.runtime import load


def in_threads(n, work):
    threads = [threading.Thread(target=work) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def called(pipe, *inputs):
    mean_loss(pipe(*inputs)).backward()


def stepped(pipe, *inputs):
    pipe.step(*inputs, loss_fn=mean_loss)


@pytest.mark.parametrize("trains", [called, stepped])
def test_steps_of_one_pipeline_in_several_threads_add_up(tmp_path, trains):
    model, pipe = both(tmp_path, TIED, devices=(0, 1, 1))
    for _ in range(10):
        in_threads(3, lambda: trains(pipe, *TIED.inputs()))
    for _ in range(30):
        mean_loss(model(*TIED.inputs())).backward()
    assert_same_state(pipe, model)
    with torch.no_grad():
        for each in (model, pipe):
            each.embed.weight.mul_(3.0)
    stepped(copy.deepcopy(pipe), *TIED.inputs())
    trains(pipe, *TIED.inputs())
    mean_loss(model(*TIED.inputs())).backward()
    assert_same_state(pipe, model)


def test_what_is_set_for_the_process_holds_again_when_the_last_pipeline_ends(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    other = load(tmp_path).double()
    before = sys.getswitchinterval(), gc.isenabled()
    inside, ended = threading.Event(), threading.Event()

    def waits(output, _=None):
        inside.set()
        assert ended.wait(30)
        return mean_loss(output)

    def begins(output, _=None):
        if not inside.is_set():
            late.start()
            assert inside.wait(30)
        return mean_loss(output)

    late = threading.Thread(target=lambda: other.step(*CHAIN.inputs(), loss_fn=waits))
    pipe.step(*CHAIN.inputs(), loss_fn=begins)
    assert not gc.isenabled()
    ended.set()
    late.join(30)
    assert (sys.getswitchinterval(), gc.isenabled()) == before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@torch.no_grad()  # autograd itself may refuse to run there
def test_a_forked_process_has_lanes_of_its_own(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    pipe(*CHAIN.inputs())
    process = multiprocessing.get_context("fork").Process(target=pipe, args=CHAIN.inputs())
    process.start()
    process.join(30)
    process.kill()
    assert process.exitcode == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_forked_off_within_a_step_has_nothing_of_it(tmp_path):
    _, pipe = both(tmp_path, CHAIN)
    forked = []

    def forks(output, _=None):
        if not forked:
            forked.append(multiprocessing.get_context("fork").Process(target=evaluates))
            forked[0].start()
        return mean_loss(output)

    @torch.no_grad()
    def evaluates():
        assert gc.isenabled()
        pipe(*CHAIN.inputs())

    pipe.step(*CHAIN.inputs(), loss_fn=forks)
    forked[0].join(30)
    forked[0].kill()
    assert forked[0].exitcode == 0
