"""A block needs what its fullest op does, at that op's time."""

from fxpipe.ir import OpCost
from fxpipe.ops.fullest import fullest
from fxpipe.ops.liveness import Needed

NOTHING = frozenset[str]()


def of(*ops: tuple[OpCost, int]) -> tuple[int, int]:
    """Forward and backward, of ops a, b, ... that need as much either way."""
    names = "abc"[: len(ops)]
    costs = [cost for cost, _ in ops]
    needed = [Needed(size, size, NOTHING, NOTHING) for _, size in ops]
    return fullest(names, costs, needed, [{}] * len(ops), [0] * len(ops))[:2]


def test_what_an_op_behind_saves_is_not_there_yet_or_gone_again():
    plain, saving = OpCost(1.0, 1.0), OpCost(1.0, 1.0, (("b", 30),))
    assert of((plain, 50), (saving, 10)) == (20, 20)
    assert of((saving, 50), (plain, 10)) == (50, 50)


def test_what_comes_from_before_the_block_or_was_saved_already_stays():
    given, again = (OpCost(1.0, 1.0, ((name, 30),)) for name in ("given", "a"))
    assert of((OpCost(1.0, 1.0), 50), (given, 10)) == (50, 50)
    assert of((again, 50), (again, 10)) == (50, 50)


def test_an_op_of_many_layers_needs_less_in_a_whole_backward():
    cost = OpCost(1.0, 1.0, backward_bytes=50, freed_bytes=20)
    assert of((cost, 50)) == (50, 30)


def test_what_is_yet_to_arrive_at_ops_before_is_not_there():
    costs = [OpCost(1.0, 1.0)] * 3
    needed = [Needed(0, size, NOTHING, NOTHING) for size in (20, 50, 60)]
    assert fullest("abc", costs, needed, [{}] * 3, [0, 0, 0]).input_bytes == 60
    assert fullest("abc", costs, needed, [{}] * 3, [10, 15, 30]).input_bytes == 40
