"""torchgpipe's three modes, as a row of micro-batches: r recomputed, - kept."""

import pytest

from fxpipe.ir import CheckpointMode
from fxpipe.passes.checkpoints import place, recompute_table, recomputes


@pytest.mark.parametrize(
    ("mode", "microbatches"), [("never", "----"), ("except_last", "rrr-"), ("always", "rrrr")]
)
def test_modes(mode: str, microbatches: str) -> None:
    row = [recomputes(CheckpointMode(mode), i, 4) for i in range(4)]

    assert "".join("r" if again else "-" for again in row) == microbatches


def test_every_stage_gets_the_mode() -> None:
    assert place(CheckpointMode.ALWAYS, 3) == (CheckpointMode.ALWAYS,) * 3


def test_the_table_has_a_row_for_each_stage() -> None:
    modes = (CheckpointMode.EXCEPT_LAST, CheckpointMode.NEVER)

    assert recompute_table(modes, 2) == ((True, False), (False, False))
