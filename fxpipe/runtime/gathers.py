"""When in its row a rank gathers a stage's parameters, of which it holds its replica's share.

They are on their way while the action before the stage's first one runs, and stay until its last
one is done: the reduction of its gradients lets go of them, in inference a `Free`.
"""

from fxpipe.runtime.messages import Free, Gather, Gathered, Item, Receive, Row
from fxpipe.schedule import Action


def with_gathers(row: Row, frees: bool) -> Row:
    """The row with a `Gather` and a `Gathered` for each stage, and with a `Free` if it `frees`."""
    firsts: dict[int, int] = {}
    lasts: dict[int, int] = {}
    for place, item in enumerate(row):
        if isinstance(item, Action):
            firsts.setdefault(item.stage, place)
            lasts[item.stage] = place
    begins = {stage: _action_before(row, place) for stage, place in firsts.items()}
    found: list[Item] = []
    for place, item in enumerate(row):
        found += [Gather(stage) for stage, at in begins.items() if at == place]
        found += [Gathered(stage) for stage, at in firsts.items() if at == place]
        found.append(item)
        found += [Free(stage) for stage, at in lasts.items() if at == place and frees]
    return tuple(found)


def _action_before(row: Row, place: int) -> int:
    """Where the action before that at `place`, with what it waits for, begins."""
    before = [k for k, item in enumerate(row[:place]) if isinstance(item, Action)]
    begin = before[-1] if before else 0
    while begin > 0 and isinstance(row[begin - 1], Receive):
        begin -= 1
    return begin
