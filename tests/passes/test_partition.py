"""What cuts cost, and what can't be planned."""

import dataclasses
import math
from random import Random

import pytest
from chains import KIB, block, halved_slowly, plain, random_chain
from partitions import plan

from fxpipe.errors import PlanError, ScheduleError
from fxpipe.ir import Block, Chain, CheckpointMode, Value
from fxpipe.passes.checkpoints import place, recompute_table
from fxpipe.passes.order import build
from fxpipe.passes.partition import SOLVERS
from fxpipe.passes.partition_blocks import FRAGMENTATION
from fxpipe.passes.partition_costs import held_sets
from fxpipe.passes.partition_stages import StageCosts, stage_costs
from fxpipe.passes.simulate_costs import Message, resting_bytes
from fxpipe.schedule import Kind


def blocks(n: int) -> list[Block]:
    return [block(f"b{k}", saved=10, parameters=100) for k in range(n)]


def test_a_stage_costs_the_sum_of_its_blocks() -> None:
    stages, _ = stage_costs(plain(blocks(5)), (2,))

    assert [(s.forward_ms, s.backward_ms) for s in stages] == [(2.0, 4.0), (3.0, 6.0)]
    assert [(s.saved_bytes, s.static_bytes) for s in stages] == [(20, 400), (30, 600)]


def test_what_two_blocks_share_counts_once_a_stage() -> None:
    tied = Block(("op",), 1.0, 1.0, saved=(("x", 7),), parameters=(("tied", 5),))
    chain = Chain((tied, tied, tied), (), (True,) * 3)

    stages, _ = stage_costs(chain, (2,))

    assert [(s.saved_bytes, s.static_bytes) for s in stages] == [(7, 10), (7, 10)]


def test_what_two_stages_share_is_held_once_on_one_device() -> None:
    tied = dataclasses.replace(block("a", parameters=5), buffers=(("table", 7),))
    chain = plain([tied, block("b", parameters=100), tied])

    stages, _ = stage_costs(chain, (1, 2), training_factor=1.0)

    assert [s.static_bytes for s in stages] == [17, 200, 17]
    assert resting_bytes(stages, (0, 1, 0), 2) == [17, 200]
    assert resting_bytes(stages, (0, 1, 1), 2) == [17, 217]


def test_what_cuts_cost_hangs_on_no_others_that_were_asked_for() -> None:
    random = Random(0)
    chain = halved_slowly(random_chain(random, 12, n_skips=4), random)
    costs = StageCosts(chain, training_factor=2.0)

    for _ in range(50):
        cuts = sorted(random.sample(range(1, 12), random.randint(0, 5)))

        assert costs(cuts) == stage_costs(chain, cuts, training_factor=2.0)


def test_workspace_is_the_largest_of_a_block() -> None:
    chain = Chain(
        tuple(
            Block(("op",), 1, 1, forward_workspace_bytes=f, backward_workspace_bytes=b)
            for f, b in ((3, 30), (9, 90), (4, 100))
        ),
        (),
        (True,) * 3,
    )
    stages, _ = stage_costs(chain, (1,))

    assert [stage.forward_workspace_bytes for stage in stages] == [3, 9]
    assert [stage.backward_workspace_bytes for stage in stages] == [30, 100]


def test_what_a_stage_is_sent_or_sent_back_counts_once() -> None:
    """Block 2 joins two values of block 0; what it makes is read by block 3 and by block 4."""

    def op(name: str, forward: int, backward: int, waiting: str, returning: str) -> Block:
        return Block(
            *((name,), 1, 1),
            forward_workspace_bytes=forward,
            backward_workspace_bytes=backward,
            input_workspace_bytes=backward,
            waiting=frozenset(waiting),
            returning=frozenset(returning),
        )

    chain = Chain(
        (
            op("0", 5, 35, "", "xy"),
            op("1", 40, 41, "xy", "xy"),
            op("2", 50, 51, "xy", "z"),
            op("3", 33, 62, "z", "z"),
            op("4", 10, 11, "z", ""),
        ),
        (
            Value("x", 10, 0, (2,), gradient=True),
            Value("y", 20, 0, (2,), gradient=True),
            Value("z", 7, 2, (3, 4), gradient=True),
        ),
        (True,) * 5,
    )
    _, second, third = stage_costs(chain, (1, 4), training_factor=0.0)[0]

    # x and y come from the first stage: as they wait for block 2, they are counted as received.
    assert second.passing_bytes == 30
    assert second.forward_workspace_bytes == max(50 - 30, 33)
    assert second.workspace_of(Kind.FORWARD, again=False) == 33 + 30
    assert second.workspace_of(Kind.FORWARD, again=True) == 33
    # z's gradient comes from the third: until block 3 adds its own, it is counted as received.
    assert second.backward_workspace_bytes == max(41, 51, 62 - 7)
    assert second.input_workspace_bytes == 55
    assert second.workspace_of(Kind.BACKWARD, again=False) == 55
    # Computed again, it has let go of z, of which it saves nothing.
    assert third.workspace_of(Kind.BACKWARD, again=True) == 11 - 7
    whole = stage_costs(chain, (), training_factor=0.0)[0][0]
    assert (whole.forward_workspace_bytes, whole.backward_workspace_bytes) == (50, 62)


def test_halves_need_other_memory_than_a_whole_backward() -> None:
    def op(name: str, workspace: int, of_inputs: int, of_weights: int) -> Block:
        saved = ((f"{name}/saved_0", 30),)
        return Block(
            *((name,), 1.0, 2.0, saved),
            forward_workspace_bytes=workspace,
            backward_workspace_bytes=workspace,
            arriving_bytes=7,
            input_workspace_bytes=of_inputs,
            weight_workspace_bytes=of_weights,
        )

    chain = plain([op("first", 90, 80, 20), op("a", 90, 80, 20), op("b", 40, 30, 25)], n_bytes=0)
    first, second = stage_costs(chain, (1,), training_factor=0.0)[0]
    share = math.ceil(FRAGMENTATION * 60)
    # While a runs, b has saved nothing, or it is gone again; of a backward in halves it stays.
    needed = [second.workspace_of(Kind(kind), again=False) for kind in "FBIW"]
    assert [n_bytes - share for n_bytes in needed] == [60, 60, 80, 25]
    assert second.arriving_bytes == 14
    # Nobody waits for what the first stage's first half could send: W does it all.
    assert len({first.workspace_of(Kind(kind), again=False) for kind in "FBIW"}) == 1
    assert first.arriving_bytes == 0


def test_what_arrives_at_blocks_before_is_not_there_yet() -> None:
    def op(name: str, arriving: int, of_inputs: int) -> Block:
        return Block(
            *((name,), 1.0, 2.0),
            backward_workspace_bytes=1,
            arriving_bytes=arriving,
            input_workspace_bytes=of_inputs,
        )

    blocks = [op("first", 9, 0), op("a", 10, 20), op("b", 30, 35), op("c", 5, 40)]
    _, second = stage_costs(plain(blocks, n_bytes=0), (1,), training_factor=0.0)[0]
    assert second.arriving_bytes == 45
    assert second.input_workspace_bytes == max(20, 35 - 10, 40 - 10 - 30)


def test_what_is_saved_behind_the_last_weights_is_gone_before_the_second_half() -> None:
    def op(name: str, weight_ms: float, arriving: int) -> Block:
        saved = ((f"{name}/saved_0", 30), ("a", 40))
        return Block(
            *((name,), 1.0, 2.0, saved),
            weight_gradient_ms=weight_ms,
            arriving_bytes=arriving,
            backward_workspace_bytes=10,
            input_workspace_bytes=10,
        )

    chain = plain([op("first", 1.0, 50), op("a", 1.0, 50), op("loss", 0.0, 0)], n_bytes=0)
    (_, last), _ = stage_costs(chain, (1,), training_factor=0.0)
    share = math.ceil(FRAGMENTATION * last.saved_bytes)
    # What `a` saves too stays.
    assert last.saved_bytes == 30 + 40 + 30
    assert last.arriving_bytes == 50 - 30
    assert last.input_workspace_bytes == 10 + 30 + share


def test_the_gradient_of_a_weight_that_several_blocks_read_adds_up() -> None:
    first, second, third = (
        Block(
            (name,),
            1.0,
            2.0,
            parameters=(("tied", 64), ("read", 32), (name, 8)),
            backward_workspace_bytes=10,
            trained=(("tied", 64), (name, 8)),
        )
        for name in "abc"
    )
    stages, _ = stage_costs(plain([first, second, third], n_bytes=0), (1,), training_factor=0.0)
    share = [math.ceil(FRAGMENTATION * stage.static_bytes) for stage in stages]
    needed = [stage.backward_workspace_bytes for stage in stages]
    assert needed == [10 + share[0], 10 + 2 * 64 + share[1]]


def test_such_a_gradient_adds_up_while_what_was_saved_behind_goes() -> None:
    first, second = (
        Block(
            (name,),
            1.0,
            2.0,
            saved=((name, 200),),
            parameters=(("tied", 64),),
            backward_workspace_bytes=10,
            trained=(("tied", 64),),
        )
        for name in "ab"
    )
    (stage,), _ = stage_costs(plain([first, second], n_bytes=0), (), training_factor=0.0)
    share = math.ceil(FRAGMENTATION * (64 + 2 * 200))
    assert stage.backward_workspace_bytes == 10 + 64 + share


def test_what_only_the_caller_reads_is_gone_after_the_loss_though_a_stage_recomputes() -> None:
    makes, reads = (
        Block((name,), 1.0, 2.0, forward_workspace_bytes=10, backward_workspace_bytes=10)
        for name in "ab"
    )
    values = (Value("x", 3, 0, (1,), True), Value("y", 100, 0, (2,), False))
    (_, last), _ = stage_costs(Chain((makes, reads), values, (True,) * 2), (1,))
    assert (last.passing_bytes, last.returned_bytes) == (103, 100)
    needed = [last.workspace_of(kind, again=True) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    # What it computes from again is gone once it has.
    assert needed == [10 + 100, max(10 - 3, 10)]


def test_of_what_the_last_stage_reads_and_returns_two_gradients_come_back() -> None:
    makes, reads = blocks(2)
    for consumers, n_gradients in (((1,), 1), ((2,), 1), ((1, 2), 2)):
        chain = Chain((makes, reads), (Value("x", 3, 0, consumers, True),), (True,) * 2)
        _, (message,) = stage_costs(chain, (1,))
        assert (message.bytes, message.values) == (3, 1)
        assert (message.gradient_bytes, message.gradients) == (3 * n_gradients, n_gradients)


def test_an_input_that_no_backward_keeps_is_gone_after_the_forward() -> None:
    reader = Block(("op",), 1.0, 1.0, saved=(("kept", 8),), forward_workspace_bytes=1)
    values = (Value("kept", 8, -1, (0,), False), Value("read", 16, -1, (0,), False))
    (stage,), _ = stage_costs(Chain((reader,), values, (True,)), ())
    assert (stage.input_bytes, stage.passing_bytes) == (24, 16)


def test_two_views_of_one_memory_are_two_tensors_once_they_are_sent() -> None:
    makes = Block(("x", "turned"), 1.0, 1.0, forward_workspace_bytes=1)
    reads = Block(("product",), 1.0, 1.0, saved=(("x", 8),), forward_workspace_bytes=1)
    values = (Value("x", 8, 0, (1,), True), Value("turned", 8, 0, (1,), True, view_of="x"))
    stages, (message,) = stage_costs(Chain((makes, reads), values, (True,) * 2), (1,))
    assert message.bytes == 16
    assert (stages[1].saved_bytes, stages[1].passing_bytes) == (0, 0)


def test_a_view_that_comes_in_is_saved_in_its_own_memory() -> None:
    makes = Block(("x", "part"), 1.0, 1.0, forward_workspace_bytes=1)
    reads = Block(("square",), 1.0, 1.0, saved=(("x", 80),), forward_workspace_bytes=1)
    values = (Value("part", 8, 0, (1,), True, view_of="x"),)
    stages, _ = stage_costs(Chain((makes, reads), values, (True,) * 2), (1,))
    assert (stages[1].saved_bytes, stages[1].passing_bytes) == (0, 0)


def test_a_loss_is_taken_as_the_last_forward_ends_but_not_as_it_is_computed_again() -> None:
    first, last = (
        Block((name,), 1.0, 2.0, forward_workspace_bytes=10, backward_workspace_bytes=10)
        for name in "ab"
    )
    chain = plain([first, dataclasses.replace(last, loss_bytes=50)], n_bytes=0)
    stages, _ = stage_costs(chain, (1,), training_factor=0.0)
    assert [stage.workspace_of(Kind.FORWARD, again=True) for stage in stages] == [10, 50]
    assert [stage.workspace_of(Kind.BACKWARD, again=True) for stage in stages] == [10, 10]


def test_a_value_goes_straight_to_each_stage_that_reads_it() -> None:
    values = (
        Value("next", 1, 0, (1,), gradient=True),
        Value("skip", 10, 0, (2, 3), gradient=True),
        Value("mask", 100, 0, (3,), gradient=False),
        Value("inside", 1000, 2, (3,), gradient=True),
        Value("output", 10000, 1, (4,), gradient=True),
    )
    chain = Chain(tuple(blocks(4)), values, (True,) * 4)

    assert stage_costs(chain, (1, 2))[1] == (
        Message(0, 1, bytes=1, gradient_bytes=1, values=1, gradients=1),
        Message(0, 2, bytes=110, gradient_bytes=10, values=2, gradients=1),
        Message(1, 2, bytes=10000, gradient_bytes=10000, values=1, gradients=1),
    )


def test_the_models_inputs_are_held_but_not_sent() -> None:
    values = (Value("x", 8, -1, (0, 2), gradient=False), Value("v", 1, 0, (1,), gradient=True))
    stages, messages = stage_costs(Chain(tuple(blocks(3)), values, (True,) * 3), (1, 2))

    assert [s.input_bytes for s in stages] == [8, 0, 8]
    assert messages == (Message(0, 1, 1, 1),)


def test_a_received_value_that_is_saved_counts_as_received() -> None:
    reader = Block(("op",), 1.0, 1.0, saved=(("v0", 1000), ("own", 5)))
    chain = plain([block("b0"), reader])

    assert stage_costs(chain, (1,))[0][1].saved_bytes == 5
    assert stage_costs(chain, ())[0][0].saved_bytes == 1005


@pytest.mark.parametrize(
    ("schedule", "mode", "held"),
    [
        ("gpipe", "never", [[(4, 4)], [(4, 4)]]),
        ("1f1b", "never", [[(2, 2)], [(1, 1)]]),
        ("1f1b", "always", [[(1, 2)], [(1, 1)]]),
        ("gpipe", "except_last", [[(1, 4)], [(1, 4)]]),
        ("1f1b", "except_last", [[(2, 2)], [(1, 1)]]),
    ],
)
def test_saved_sets_and_microbatches_held_at_the_fullest(
    schedule: str, mode: str, held: list[list[tuple[int, int]]]
) -> None:
    recompute = recompute_table(place(CheckpointMode(mode), 2), 4)

    assert held_sets(build(schedule, 2, 4), recompute) == tuple(tuple(one) for one in held)


@pytest.mark.parametrize("solver", SOLVERS)
def test_equal_blocks_are_cut_into_equal_stages(solver: str) -> None:
    found = plan(plain(blocks(8)), 4, solver=solver, schedule="gpipe")

    assert found.cuts == (2, 4, 6)
    assert found.stage_to_device == (0, 1, 2, 3)
    assert found.schedule.to_csv().splitlines()[3] == "3F0,3F1,3F2,3F3,3B3,3B2,3B1,3B0"
    # The last one gets the gradient of the output, too.
    assert [stage.received_bytes for stage in found.estimate.stages] == [0, 1000, 1000, 2000]
    assert found.solver == solver


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_stage_is_the_whole_model(solver: str) -> None:
    found = plan(plain(blocks(3)), 1, solver=solver)

    assert (found.cuts, found.estimate.bubble) == ((), 0.0)
    assert found.estimate.step_ms == pytest.approx(4 * 9.0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_as_many_stages_as_blocks(solver: str) -> None:
    assert plan(plain(blocks(4)), 4, solver=solver).cuts == (1, 2, 3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_cuts_stand_only_where_they_may(solver: str) -> None:
    chain = plain(blocks(6))
    chain = Chain(chain.blocks, chain.values, (True, False, False, False, True, True))

    assert plan(chain, 2, solver=solver).cuts in ((1,), (5,))
    assert plan(chain, 3, solver=solver).cuts == (1, 5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_memory_moves_the_cut(solver: str) -> None:
    # In 1F1B stage 0 keeps two micro-batches, stage 1 one: even stages would need 80 KiB.
    chain = plain([block(f"b{k}", saved=10 * KIB) for k in range(8)], n_bytes=1)

    assert plan(chain, 2, solver=solver).cuts == (4,)
    assert plan(chain, 2, solver=solver, capacity_bytes=(61 * KIB,) * 2).cuts == (3,)


def test_too_many_devices() -> None:
    chain = plain(blocks(30))
    cuttable = tuple(k % 3 != 0 for k in range(29))

    with pytest.raises(PlanError) as error:
        plan(Chain(chain.blocks, chain.values, (*cuttable, True)), 64)

    assert str(error.value) == (
        "64 stages, but the model has only 20 blocks that can be cut apart: use at most 20, "
        "one for each device and loop"
    )


def test_where_parameters_alone_are_too_much_smaller_micro_batches_are_no_help() -> None:
    chain = plain([block(f"b{k}", parameters=KIB) for k in range(2)], n_bytes=1)

    with pytest.raises(PlanError, match=r"and has 1 byte \(.* help: devices with more memory$"):
        plan(chain, 2, capacity_bytes=(1,) * 2)


@pytest.mark.parametrize(
    ("capacity", "says"), [(KIB, "with more memory$"), (5 * KIB, "help: more than 2 devices")]
)
def test_more_devices_help_only_where_the_largest_block_fits_one(capacity: int, says: str) -> None:
    chain = plain([block(f"b{k}", parameters=2 * KIB) for k in range(4)], n_bytes=1)

    with pytest.raises(PlanError, match=says):
        plan(chain, 2, capacity_bytes=(capacity,) * 2)


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_does_not_fit_says_which_device_and_what_would_help(solver: str) -> None:
    chain = plain([block(f"b{k}", saved=10 * KIB) for k in range(4)], n_bytes=1)

    with pytest.raises(PlanError) as error:
        plan(chain, 2, solver=solver, capacity_bytes=(15 * KIB,) * 2)

    assert str(error.value) == (
        "no partition fits: in the best one found, device 1 needs 30.00 KiB and has 15.00 KiB "
        "(parameters and what training keeps of them 0 bytes, saved for one micro-batch "
        "30.00 KiB). What would help: "
        "more than 2 devices, or smaller micro-batches (more of them), or `--checkpoint auto`"
    )


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(PlanError) as error:
        plan(plain(blocks(2)), 0, 0, solver="magic")

    assert str(error.value).split("; ") == [
        "there is no solver 'magic': use one of dp, beam, cpsat",
        "0 micro-batches: a step needs at least 1",
        "0 stages: a plan needs at least 1",
    ]


def test_an_unknown_schedule() -> None:
    with pytest.raises(ScheduleError, match="no schedule 'zb'"):
        plan(plain(blocks(2)), 1, schedule="zb")


def test_a_cut_moves_to_where_it_divides_fewer_modules_if_that_costs_almost_nothing() -> None:
    blocks = tuple(Block((f"op{k}",), 10.0 if k in (0, 5) else 0.01, 0.0) for k in range(6))
    values = tuple(Value(f"op{k}", 8, k, (k + 1,), True) for k in range(5))
    bare = Chain(blocks, values, (True,) * 6)
    shortest = plan(bare, 2)
    for whole in (1, 2, 3, 4, 5):
        divides = tuple(0 if k + 1 == whole else 2 for k in range(6))
        tidy = plan(dataclasses.replace(bare, divides=divides), 2)
        assert tidy.cuts == (whole,)
        assert tidy.estimate.step_ms <= 1.01 * shortest.estimate.step_ms
    uneven = tuple(dataclasses.replace(b, forward_ms=1.0 + (k == 3)) for k, b in enumerate(blocks))
    chain = dataclasses.replace(bare, blocks=uneven)
    dear = dataclasses.replace(chain, divides=(0, 2, 2, 2, 2, 2))
    assert plan(dear, 2).cuts == plan(chain, 2).cuts != (1,)
