"""`fxpipe plan`: plans of a model, or of a bare chain of costs, beside each other."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fxpipe.cli.answer import answering
from fxpipe.cli.arguments import (
    BATCH,
    OPTIMIZER,
    TIME_LIMIT_S,
    Capture,
    DevicesText,
    Json,
    Seed,
    Workers,
    count_of,
)
from fxpipe.errors import InputError


class Recompute(StrEnum):
    """Whether blocks may be computed again in backward."""

    NEVER = "never"
    AUTO = "auto"


def plan_command(
    devices: DevicesText,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET", help="model.py, model.py:factory or package.module:factory"
        ),
    ] = None,
    chain: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Costs by block, in place of a model."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help=f"Rows of a training step of TARGET. [default: {BATCH}]"),
    ] = None,
    microbatches: Annotated[
        str | None,
        typer.Option(metavar="COUNT|auto", help="As for compile, auto of a TARGET alone."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="auto|cpsat|NAME|FILE.csv",
            help="Plan for this one alone [default: the named ones and auto, compared]",
        ),
    ] = None,
    loops: Annotated[
        int | None,
        typer.Option(min=1, help="Stages a device [default: 1, 2, 3, 4 and 6 are tried]"),
    ] = None,
    checkpoint: Annotated[
        Recompute, typer.Option(help="auto: compute blocks again where that pays.")
    ] = Recompute.NEVER,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FILE|analytic:DEVICE", help="The costs of TARGET's ops."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="22GiB, or one amount for each device.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="sgd|momentum|adam|adamw|FILE",
            help=f"Whose state each device holds, of a TARGET. [default: {OPTIMIZER}]",
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(metavar="4x8:nvlink4/ib400", help="Links by name, in place of the costs'."),
    ] = None,
    capture: Capture = None,
    time_limit: Annotated[
        float, typer.Option(min=0.1, help="Seconds for the search.")
    ] = TIME_LIMIT_S,
    seed: Seed = 0,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compare plans of TARGET, or of a bare chain: schedule, cuts, step, bubble, peak, gap."""
    with answering(as_json) as answer:
        import dataclasses

        from fxpipe.chain_file import load_chain
        from fxpipe.costs.capacity import capacities
        from fxpipe.costs.first_microbatch import check_rows
        from fxpipe.costs.profile_file import costs_of
        from fxpipe.costs.topology import network_of
        from fxpipe.planner import (
            Answer,
            answered,
            chain_question,
            model_questions,
            named,
            one_device_ms,
            shortest,
        )
        from fxpipe.question import Question
        from fxpipe.runtime.device_names import count_devices, parse_devices
        from fxpipe.schedule import Schedule
        from fxpipe.settings import (
            check_settings,
            microbatch_counts,
            table_of,
            usual_microbatches,
        )
        from fxpipe.show import plan as report_plan
        from fxpipe.show.progress import BestSoFar

        if (target is None) == (chain is None):
            raise InputError("give a TARGET, or --chain FILE.json in its place")
        counted = count_of(microbatches)
        if chain is not None:
            for option, given in (
                ("--batch", batch),
                ("--profile", profile),
                ("--optimizer", optimizer),
            ):
                if given is not None:
                    raise InputError(
                        f"{option} is of a TARGET: a chain's file has its costs itself"
                    )
            if counted == "auto":
                raise InputError(
                    "--microbatches auto is of a TARGET: a chain's costs are of one micro-batch, "
                    "and nothing says what they are of a larger or a smaller one: give a number"
                )
        order: Schedule | str = schedule or "auto"
        if schedule is not None and schedule.endswith(".csv"):
            order = Schedule.read(schedule)
        # Of a bare chain nothing is measured: its devices need not be here.
        lanes = parse_devices(devices) if chain is None else ()
        n_devices = len(lanes) or count_devices(devices)
        rows = batch or BATCH
        if counted is None:
            usual = usual_microbatches(n_devices, rows if chain is None else None)
            counted = order.n_microbatches if isinstance(order, Schedule) else usual
        # Before the work rather than after it.
        check_settings(counted, loops, order, "never", "dp", time_limit)
        costs = None if profile is None else costs_of(profile)
        counts = microbatch_counts(counted, n_devices, order, costs)
        if chain is None:
            check_rows(rows, min(counts))
            counts = tuple(count for count in counts if count <= rows)
        tables = {count: table_of(order, n_devices, count, loops) for count in counts}
        capacity = None if memory is None else capacities(memory, n_devices)
        links = None if topology is None else network_of(topology, n_devices)
        if chain is not None:
            questions = [chain_question(load_chain(chain), n_devices, counts[0])]
        else:
            assert target is not None
            questions = model_questions(target, lanes, rows, counts, costs, optimizer or OPTIMIZER)

        def asked(question: Question) -> Question:
            question = dataclasses.replace(question, checkpoint=checkpoint.value, loops=loops)
            if capacity is not None:
                question = dataclasses.replace(question, capacity_bytes=capacity)
            if links is not None:
                question = question.over(links)
            return question if capture is None else dataclasses.replace(question, hosts=None)

        with BestSoFar() as progress:

            def planned(question: Question) -> Answer:
                return answered(
                    question,
                    order,
                    tables[question.n_microbatches],
                    seed=seed,
                    workers=workers,
                    time_limit_s=time_limit / len(questions),
                    progress=progress,
                )

            question, found, others = shortest([*map(asked, questions)], planned)
        if schedule is None:
            others += named(question, seed=seed, workers=workers)
        alone_ms = one_device_ms(question)
        answer(
            report_plan.plan_json(question, found, others, alone_ms),
            report_plan.plan_table(question, found, others, alone_ms),
        )
