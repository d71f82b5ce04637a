"""The simulator's rules written down a second time, without a thought for speed.

Times come from recursion over "waits for", memory from intervals [start, end) looked at one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fxpipe.ir import Network, Wait
from fxpipe.passes.simulate_costs import Message, StageCost
from fxpipe.schedule import Action, Kind, Schedule

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
HALF = Kind.INPUT
Sent = tuple[Action, int]


@dataclass(frozen=True)
class Naive:
    """What both simulators say."""

    step_ms: float
    bubble: float
    peak_bytes: tuple[int, ...]
    spans: tuple[tuple[tuple[float, float], ...], ...]


def naive(
    schedule: Schedule,
    stages: Sequence[StageCost],
    messages: Sequence[Message],
    network: Network,
    recompute: Sequence[Sequence[bool]],
    waits: Sequence[Wait] | None = None,
) -> Naive:
    """With `waits`, what is sent waits for them, and is there from when on it is on its way."""
    until = {(w.sent, device): w.ended for w in waits or () for device in [_place(schedule, w)]}

    def backward(stage: int, microbatch: int) -> Action:
        return Action(stage, HALF if (stage, microbatch) in schedule.split else B, microbatch)

    def last(stage: int, microbatch: int) -> Action:
        return Action(stage, W if (stage, microbatch) in schedule.split else B, microbatch)

    device_of = {action.stage: d for d, row in enumerate(schedule.rows) for action in row}
    size = {(m.source, m.target, F): m.bytes for m in messages}
    for kind in (B, HALF):
        size |= {
            (m.target, m.source, kind): m.gradient_bytes
            for m in messages
            if m.gradient_bytes is not None
        }
    size = {key: b for key, b in size.items() if device_of[key[0]] != device_of[key[1]]}

    def outbox(action: Action) -> list[Sent]:
        to = [t for s, t, kind in size if (s, kind) == (action.stage, action.kind)]
        return [(action, t) for t in sorted(to, key=lambda t: abs(t - action.stage))]

    def n_bytes(sent: Sent) -> int:
        return size[sent[0].stage, sent[1], sent[0].kind]

    def pair(sent: Sent) -> tuple[int, int]:
        return device_of[sent[0].stage], device_of[sent[1]]

    on_link: dict[tuple[int, int], list[Sent]] = {}
    for row in schedule.rows:
        for action in row:
            for sent in outbox(action):
                on_link.setdefault(pair(sent), []).append(sent)

    def sending_ms(action: Action) -> float:
        total = 0.0
        for message in messages:
            ends = (message.source, message.target)
            source, target = (device_of[stage] for stage in ends)
            if action.stage not in ends or source == target:
                continue
            if action.kind is F:
                link = network.between(source, target)
                total += link.value_ms * message.values + link.byte_ms * message.bytes
            elif message.gradient_bytes is not None:
                link = network.between(target, source)
                total += link.value_ms * message.gradients + link.byte_ms * message.gradient_bytes
        return total

    @cache
    def start(action: Action) -> float:
        row = schedule.rows[device_of[action.stage]]
        before = row[: row.index(action)][-1:]
        sending = [sent for other in before for sent in outbox(other) if waits is not None]
        i = action.microbatch
        senders = {
            s for s, t, kind in size if t == action.stage and (kind is F) == (action.kind is F)
        }
        inbox = [
            (Action(s, F, i) if action.kind is F else backward(s, i), action.stage)
            for s in (senders if action.kind is not W else ())
        ]
        return max(
            0.0,
            *(end(other) for other in (*before, *schedule.needs(action))),
            *(arrival(sent) for sent in inbox),
            *(departure(sent) for sent in sending),
            0.0,
        )

    @cache
    def end(action: Action) -> float:
        cost = stages[action.stage]
        if action.kind is F:
            return start(action) + cost.forward_ms + sending_ms(action)
        if action.kind is W:
            return start(action) + cost.weight_gradient_ms
        again = cost.forward_ms if recompute[action.stage][action.microbatch] else 0.0
        later = cost.weight_gradient_ms - cost.halving_ms if action.kind is HALF else 0.0
        whole = cost.backward_ms + cost.again_ms + again + sending_ms(action)
        return start(action) + whole - later

    @cache
    def departure(sent: Sent) -> float:
        queue = on_link[pair(sent)]
        before = queue[: queue.index(sent)][-1:]
        awaited = until.get((sent[0], pair(sent)[1]))
        return max(
            end(sent[0]),
            *(arrival(other) for other in before),
            end(awaited) if awaited else 0.0,
            0.0,
        )

    @cache
    def arrival(sent: Sent) -> float:
        return departure(sent) + network.between(*pair(sent)).transfer_ms(n_bytes(sent))

    def intervals(device: int) -> list[tuple[float, float, int]]:
        held = []
        for action in schedule.rows[device]:
            cost = stages[action.stage]
            again = recompute[action.stage][action.microbatch]
            needed = {
                F: max(cost.forward_workspace_bytes, cost.loss_bytes),
                B: cost.backward_workspace_bytes,
                HALF: cost.input_workspace_bytes,
                W: cost.weight_workspace_bytes,
            }
            held.append((start(action), end(action), needed[action.kind]))
            if again and action.kind in (B, HALF):
                # What is computed again has let go of what it was computed from, or not yet.
                gone = needed[action.kind] - (cost.passing_bytes - cost.returned_bytes)
                more = max(gone, cost.forward_workspace_bytes) - needed[action.kind]
                held.append((start(action), end(action), more))
            if action.kind in (B, W):
                forward = Action(action.stage, F, action.microbatch)
                saved_from = backward(action.stage, action.microbatch) if again else forward
                held.append((start(saved_from), end(action), cost.saved_bytes))
                passed = cost.returned_bytes if again else cost.passing_bytes
                held.append((end(forward), end(action), -passed))
                if again:
                    held.append((start(forward), end(action), cost.written_bytes))
                held.append((start(forward), end(action), cost.input_bytes))
                handed = sum(
                    message.handed_bytes
                    for message in messages
                    if message.source == action.stage and device_of[message.target] == device
                )
                held.append((start(forward), end(action), handed))
                if action.kind is W:
                    first = backward(action.stage, action.microbatch)
                    held.append((start(first), end(action), cost.arriving_bytes))
                if not again:
                    repeated = backward(action.stage, action.microbatch)
                    held.append((start(repeated), end(action), cost.again_bytes))
        for queue in on_link.values():
            for sent in queue:
                if device_of[sent[1]] == device:
                    freed = end(last(sent[1], sent[0].microbatch))
                    ready = stages[sent[1]].backward_workspace_bytes > 0 and waits is None
                    since = start(sent[0]) if ready else departure(sent)
                    held.append((since, freed, n_bytes(sent)))
        return held

    def peak(device: int) -> int:
        held = intervals(device)
        always = sum(cost.static_bytes for j, cost in enumerate(stages) if device_of[j] == device)
        moments = [first for first, _, _ in held]
        return always + max(sum(b for s, e, b in held if s <= t < e) for t in moments)

    spans = tuple(tuple((start(a), end(a)) for a in row) for row in schedule.rows)
    step = max(e for row in spans for _, e in row)
    busy = sum(e - s for row in spans for s, e in row)
    return Naive(
        step_ms=step,
        bubble=1 - busy / (len(spans) * step),
        peak_bytes=tuple(peak(d) for d in range(len(spans))),
        spans=spans,
    )


def _place(schedule: Schedule, wait: Wait) -> int:
    """The device that is waited for."""
    return next(d for d, row in enumerate(schedule.rows) if wait.ended in row)
