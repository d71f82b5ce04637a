"""What `fxpipe plan` prints: the best plan, and others beside it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from fxpipe.ir import CheckpointMode, Plan
from fxpipe.passes.search.ordered import NAME as ORDERED
from fxpipe.planner import Answer
from fxpipe.question import Question
from fxpipe.show.table import new_table, spaced
from fxpipe.show.texts import bytes_text, ms_text, plural


def plan_json(
    question: Question, found: Answer, others: Sequence[Answer], alone_ms: float | None
) -> dict[str, Any]:
    """The best plan; times in ms, bytes by device, `schedule` as rows of cells.

    `one_device_ms` is the step on one of them alone, None where it doesn't fit. With recomputation
    each plan's `recomputed` has the runs of blocks, by stage, and its `checkpoint` the mode that
    stages are computed again whole by, if they are; `recompute_ms` is what the best one's add.
    """
    plan = found.plan
    assert plan is not None
    facts = {
        "microbatches": question.n_microbatches,
        **_plan_json(question, plan),
        "seconds": found.seconds,
        "one_device_ms": alone_ms,
    }
    if question.recompute:
        facts["recompute_ms"] = _again_ms(question, plan)
    if others:
        facts["candidates"] = [
            {"name": other.schedule, "seconds": other.seconds}
            | ({"error": other.why_not} if other.plan is None else _plan_json(question, other.plan))
            for other in others
        ]
    return facts


def _plan_json(question: Question, plan: Plan) -> dict[str, Any]:
    again = {
        "recomputed": [[list(run) for run in runs] for runs in _runs_of(question, plan)],
        "checkpoint": plan.checkpoint[0],
    }
    return {
        **(again if question.recompute else {}),
        "cuts": list(plan.cuts),
        "devices": list(plan.stage_to_device),
        "schedule": [[str(action) for action in row] for row in plan.schedule.rows],
        "step_ms": plan.estimate.step_ms,
        "bubble": plan.estimate.bubble,
        "peak_bytes": list(plan.estimate.peak_bytes),
        "lower_bound_ms": plan.bound_ms,
        "gap": plan.gap,
        "solver": plan.solver,
    }


def plan_table(
    question: Question, found: Answer, others: Sequence[Answer], alone_ms: float | None
) -> RenderableType:
    """A line for each plan, the shortest step first; then the best one's stages.

    And `alone_ms`, the step on one device alone, where that is shorter.
    """
    plan = found.plan
    assert plan is not None
    headings = ("schedule", "stages", "step", "bubble", "peak", "gap", "solver", "seconds")
    table = new_table(*headings, left=("schedule", "solver"))
    planned = [(one, one.plan) for one in (found, *others) if one.plan is not None]
    for answer, its_plan in sorted(planned, key=lambda pair: pair[1].estimate.step_ms):
        table.add_row(*_line(answer, its_plan))
    parts: list[RenderableType] = [_heading(question), table]
    parts += [f"{other.schedule}: {escape(other.why_not)}" for other in others if not other.plan]
    parts.append(_best(question, plan, alone_ms))
    return spaced(parts)


def _heading(question: Question) -> str:
    return (
        f"[bold]{plural(len(question.chain.blocks), 'block')}[/bold] on "
        f"{plural(question.n_devices, 'device')} in "
        f"{plural(question.n_microbatches, 'micro-batch', 'es')}"
    )


def _line(answer: Answer, plan: Plan) -> list[str]:
    estimate = plan.estimate
    return [
        answer.schedule,
        str(len(plan.cuts) + 1),
        ms_text(estimate.step_ms),
        f"{estimate.bubble:z.1%}",
        bytes_text(max(estimate.peak_bytes)),
        "" if plan.gap is None else f"{plan.gap:z.1%}",
        plan.solver,
        f"{answer.seconds:.1f}",
    ]


def _best(question: Question, plan: Plan, alone_ms: float | None) -> str:
    bounds = (0, *plan.cuts, len(question.chain.blocks))
    again = _runs_of(question, plan)
    but_last = CheckpointMode.EXCEPT_LAST in plan.checkpoint
    whole = ", of all micro-batches but the last" if but_last else ""
    lines = [
        f"stage {j} on device {device}: blocks {bounds[j]} to {bounds[j + 1] - 1}"
        + (f", computes again {_text(again[j])}{whole}" if again else "")
        for j, device in enumerate(plan.stage_to_device)
    ]
    if plan.bound_ms is not None:
        ordered = plan.solver == ORDERED
        what = "order of these actions" if ordered else "plan of this chain on these devices"
        lines.append(f"no {what} takes less than {ms_text(plan.bound_ms)}")
    if question.n_devices > 1 and alone_ms is not None and alone_ms < plan.estimate.step_ms:
        lines.append(f"one device alone takes {ms_text(alone_ms)}, less than all of them")
    if again:
        lines.append(
            f"computing again adds {ms_text(_again_ms(question, plan))} to a micro-batch, over "
            "all stages"
        )
    return "\n".join(lines)


def _again_ms(question: Question, plan: Plan) -> float:
    blocks = question.chain.blocks
    return sum(
        blocks[k].forward_ms
        for runs in _runs_of(question, plan)
        for begin, end in runs
        for k in range(begin, end)
    )


def _runs_of(question: Question, plan: Plan) -> Sequence[Sequence[tuple[int, int]]]:
    """The blocks that each stage computes again; none at all if no stage does."""
    if set(plan.checkpoint) == {CheckpointMode.NEVER}:
        return plan.segments
    return [[stage] for stage in pairwise((0, *plan.cuts, len(question.chain.blocks)))]


def _text(runs: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{begin} to {end - 1}" for begin, end in runs) or "nothing"
