"""What ranks must agree on as a call begins."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from fxpipe.errors import InputError
from fxpipe.runtime.distributed.meeting import Given, Word, Words, agreed

GIVEN = Given((2, 1), (("batch", 3),), (torch.float32,), (False,))
NOTHING = Given((), (), (None,), (None,))
WORD = Word("as pipe.step(...)", True, "under no autocast", GIVEN, None, None)


def test_inputs_on_one_rank_are_enough():
    assert agreed([replace(WORD, given=NOTHING), WORD], 2) == [GIVEN]
    assert agreed([WORD, WORD], 2) == [GIVEN]


def test_each_rank_may_have_some_of_the_inputs():
    x = Given((2, 1), (("batch", 3),), (torch.float32, None), (True, None))
    mask = Given((), (("width", 5),), (None, torch.bool), (None, False))
    both = Given((2, 1), (("batch", 3), ("width", 5)), (torch.float32, torch.bool), (True, False))
    for order in ([x, mask], [mask, x], [both, mask], [x, both]):
        (found,) = agreed([replace(WORD, given=each) for each in order], 2)
        assert replace(found, sizes=tuple(sorted(found.sizes))) == both
    wider = replace(mask, sizes=(("width", 6),))
    with pytest.raises(InputError, match=r"rank 1 was given inputs of width 5.*rank 2 of width 6"):
        agreed([replace(WORD, given=each) for each in (x, mask, wider)], 3)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(WORD, problem="no x"), "rank 1: no x"),
        (replace(WORD, training=False), "rank 1 is in eval mode, rank 0 in training mode"),
        (
            replace(WORD, what="as pipe(...)"),
            "rank 1 was called as pipe(...), rank 0 as pipe.step(...)",
        ),
        (
            replace(WORD, autocast="under autocast on cpu to torch.bfloat16"),
            "rank 1 is under autocast on cpu to torch.bfloat16, rank 0 under no autocast",
        ),
        (
            replace(WORD, given=replace(GIVEN, gradients=(True,))),
            "of batch 3, torch.float32, 0 of them with a gradient; rank 1 of batch 3, "
            "torch.float32, 1 of them with a gradient",
        ),
    ],
)
def test_ranks_that_differ_are_named_with_both_values(other, message):
    with pytest.raises(InputError) as caught:
        agreed([WORD, other], 2)
    assert message in str(caught.value)


def test_what_ranks_hold_together_is_trained_by_all_or_none():
    own, both = frozenset({"own"}), frozenset({"both"})
    for word in (replace(WORD, trained=both), replace(WORD, frozen=both)):
        assert agreed([word, replace(word, frozen=word.frozen | own)], 2) == [GIVEN]
    with pytest.raises(InputError, match="both is trained on rank 1, frozen on rank 0"):
        agreed([replace(WORD, frozen=both), replace(WORD, trained=both)], 2)


def test_no_inputs_at_all():
    nobody = replace(WORD, given=NOTHING)
    with pytest.raises(InputError, match="none of ranks 2 to 3 was given inputs"):
        agreed([WORD, WORD, nobody, nobody], 2)


def test_replicas_batches_differ_in_size_alone():
    larger = replace(GIVEN, rows=(2, 2), sizes=(("batch", 4),))
    assert agreed([WORD, replace(WORD, given=larger)], 1) == [GIVEN, larger]
    other = replace(WORD, given=replace(GIVEN, dtypes=(torch.float64,)))
    with pytest.raises(InputError, match=r"replica 1 of batch 3, torch\.float64"):
        agreed([WORD, other], 1)


class Table:
    """Where two ranks, a thread each, lay down what they have for each other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.laid: dict[int, object] = {}
        self.whole = 0  # how often whole words were told


class Seat:
    """A rank's place at the table, with the calls that `Words` makes of `Ranks`."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def begin_numbers(self, mine):
        done = threading.Event()
        done.set()
        return done, self.gather(list(map(float, mine)))

    def wait(self, done):
        assert done.is_set()

    def gather_world(self, mine):
        self._table.whole += self._rank == 0
        return self.gather(mine)

    def gather(self, mine):
        self._table.laid[self._rank] = mine
        self._table.barrier.wait()
        found = [self._table.laid[rank] for rank in range(2)]
        self._table.barrier.wait()
        return found


def batch(rows: int) -> Word:
    return replace(WORD, given=replace(GIVEN, rows=(rows,)))


def test_what_all_say_again_is_told_by_its_number():
    table = Table()
    words = [Words(Seat(table, rank)) for rank in range(2)]
    silent = replace(WORD, given=NOTHING)
    with ThreadPoolExecutor(2) as threads:

        def meet(*said):
            return list(threads.map(lambda of, word: of.end(of.begin(word)), words, said))

        for said, told in [
            ((batch(4), silent), 1),
            ((batch(4), silent), 1),
            ((batch(3), silent), 2),  # one of them says something new
            ((batch(4), silent), 3),  # both have said it before, but not last together
            ((batch(4), silent), 3),
        ]:
            assert meet(*said) == [[*said]] * 2
            assert table.whole == told
        for rows in range(100, 140):  # more than are kept
            assert meet(batch(rows), silent) == [[batch(rows), silent]] * 2
        assert meet(batch(4), silent) == [[batch(4), silent]] * 2
