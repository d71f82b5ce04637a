"""When in its row a rank gathers a stage's parameters, of which it holds its replica's share.

They stay from the stage's first action to its last, whose reduction lets go of them. Where all its
forwards come before its backwards, and between them other stages run as many actions as there are
micro-batches or more, they are let go of between and gathered once more: as often as FSDP gathers
without a pipeline. Breadth-first schedules are so (Lamy-Poirier, arXiv 2211.05953).
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from fxpipe.runtime.distributed.messages import Free, Gather, Gathered, Item, Receive, Row
from fxpipe.runtime.distributed.reductions import after_sends
from fxpipe.schedule import Action, Kind


@dataclass(frozen=True, slots=True)
class _Span:
    """The places in a row between which a stage's parameters are there."""

    stage: int
    first: int
    last: int
    frees: bool


def with_gathers(row: Row) -> Row:
    """The row with a `Gather` and a `Gathered` before each span, and a `Free` after one that frees.

    Where anything is let go of, parameters are on their way while the action before their first one
    runs; where nothing is, all are from the beginning.
    """
    spans = sorted(_spans(row), key=lambda span: span.first)
    sparing = any(span.frees for span in spans)
    begun, awaited, freed = (defaultdict[int, list[Item]](list) for _ in range(3))
    for span in spans:
        begun[_action_before(row, span.first) if sparing else 0].append(Gather(span.stage))
        awaited[span.first].append(Gathered(span.stage))
        if span.frees:
            freed[after_sends(row, span.last) - 1].append(Free(span.stage))
    found: list[Item] = []
    for place, item in enumerate(row):
        found += [*begun[place], *awaited[place], item, *freed[place]]
    return tuple(found)


def _spans(row: Row) -> Iterator[_Span]:
    actions = [(place, item) for place, item in enumerate(row) if isinstance(item, Action)]
    m = len({action.microbatch for _, action in actions})
    for stage in {action.stage for _, action in actions}:
        own = [(place, a.kind is Kind.FORWARD) for place, a in actions if a.stage == stage]
        forwards = [place for place, forward in own if forward]
        backwards = [place for place, forward in own if not forward]
        if not backwards:
            yield _Span(stage, forwards[0], forwards[-1], frees=True)
        elif sum(forwards[-1] < place < backwards[0] for place, _ in actions) >= m:
            yield _Span(stage, forwards[0], forwards[-1], frees=True)
            yield _Span(stage, backwards[0], backwards[-1], frees=False)
        else:
            yield _Span(stage, own[0][0], own[-1][0], frees=False)


def _action_before(row: Row, place: int) -> int:
    """Where the action before that at `place`, with what it waits for, begins."""
    before = [k for k, item in enumerate(row[:place]) if isinstance(item, Action)]
    begin = before[-1] if before else 0
    while begin > 0 and isinstance(row[begin - 1], Receive):
        begin -= 1
    return begin
