"""What `fxpipe verify` prints."""

from textwrap import dedent

from shown import shown

from fxpipe.difference import Difference
from fxpipe.edits import Edits
from fxpipe.show.verification import verification_table
from fxpipe.verify import Verification


def verification(*differences: Difference, notes: tuple[str, ...] = ()) -> str:
    result = Verification("float64", 8, 4, 1e-10, differences, notes)
    return shown(verification_table(result, Edits()))


def test_verification_names_the_worst():
    near = Difference("gradients", 3, 1e-13, 2e-14, "a.weight")
    gone = Difference("buffers", 2, 0.5, 0.25, "b", missing=("c.bias",))
    assert verification(near) == dedent("""\
    compared   tensors  absolute  relative  largest in
    gradients        3   1.0e-13   2.0e-14  a.weight
    equal: all within 1e-10 relative (float64, batch 8 in 4 micro-batches)
    """)
    assert verification(near, gone) == dedent("""\
    compared   tensors  absolute  relative  largest in
    gradients        3   1.0e-13   2.0e-14  a.weight
    buffers          2   5.0e-01   2.5e-01  missing: c.bias
    differs: over 1e-10 relative (float64, batch 8 in 4 micro-batches)
    """)


def test_verification_says_what_was_compared_in_another_way():
    near = Difference("outputs", 3, 1e-13, 2e-14, "scores")
    lines = verification(near, notes=("output.scores [batch, batch]: by micro-batch",)).split("\n")
    assert lines[2] == "output.scores [batch, batch]: by micro-batch"
