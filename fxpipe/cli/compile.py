"""`fxpipe compile`: a model becomes a package."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fxpipe.cli.answer import answering, say
from fxpipe.cli.arguments import (
    BATCH,
    OPTIMIZER,
    TIME_LIMIT_S,
    Capture,
    DevicesText,
    Json,
    Seed,
    TargetText,
    Workers,
    count_of,
)
from fxpipe.errors import InputError


class CheckpointName(StrEnum):
    """Micro-batches whose activations are recomputed in backward."""

    NEVER = "never"
    EXCEPT_LAST = "except_last"
    ALWAYS = "always"
    AUTO = "auto"


class SolverName(StrEnum):
    """Ways to find the cuts."""

    DP = "dp"
    BEAM = "beam"
    CPSAT = "cpsat"


def compile_command(
    target: TargetText,
    devices: DevicesText,
    out: Annotated[Path, typer.Option("--out", "-o", help="The package's folder.")],
    batch: Annotated[int, typer.Option(min=1, help="Rows of a training step.")] = BATCH,
    microbatches: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT|auto",
            help="auto: as many as one, two or four times the devices, the best of these "
            "[default: the table's, or twice the devices, at most the batch]",
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE.csv",
            help="auto: searched together with the cuts; cpsat: half of the time for the order "
            "alone; or gpipe, 1f1b, zb-h1, zb-h2, zb-v, interleaved, bfs, or pfeife as in "
            "pfeife:B_l=4,B_f=2; or a table of your own, a row for each device.",
        ),
    ] = "1f1b",
    loops: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stages a device [default: 2 under interleaved, bfs, zb-v, else 1]"
        ),
    ] = None,
    checkpoint: Annotated[
        CheckpointName,
        typer.Option(
            help="Micro-batches that are recomputed in backward; auto: parts of stages, where that "
            "pays."
        ),
    ] = CheckpointName.NEVER,
    solver: Annotated[SolverName, typer.Option(help="How cuts are found.")] = SolverName.DP,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|analytic:DEVICE",
            help="Take the times of ops from this file, or work them out for a device such as "
            "analytic:h100: then the model is built without memory.",
        ),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="sgd|momentum|adam|adamw|FILE",
            help="Whose state each device holds, or a .toml or .json file with its dtypes.",
        ),
    ] = OPTIMIZER,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="22GiB|22GiB,40GiB,...",
            help="What each device may hold. [default: what it has]",
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="4x8:nvlink4/ib400",
            help="Nodes, devices in each, the links inside and between, in place of the "
            "profile's; 8:pcie4 is one node.",
        ),
    ] = None,
    capture: Capture = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="Write the measured times of ops to this file.")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Write the model's values too, as safetensors.")
    ] = False,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Copy the runtime too: torch alone runs it.")
    ] = False,
    time_limit: Annotated[
        float, typer.Option(min=0.1, help="Seconds for the search, if anything is auto.")
    ] = TIME_LIMIT_S,
    seed: Seed = 0,
    workers: Workers = None,
    allow_graph_breaks: Annotated[
        bool,
        typer.Option(
            "--allow-graph-breaks",
            help="If the model can't be captured as one graph, pipeline its largest part.",
        ),
    ] = False,
    as_json: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show each pass's time and result.")
    ] = False,
) -> None:
    """Compile the model of TARGET into a package of pipeline stages."""
    with answering(as_json) as answer:
        import torch

        from fxpipe import target as targets
        from fxpipe.compiler import compile as compile_model
        from fxpipe.costs.profile_file import check_profile_file, costs_of, is_analytic
        from fxpipe.costs.profile_file import save_profile as write_profile
        from fxpipe.edits import Edits, refuse_loss
        from fxpipe.outputs import real
        from fxpipe.runtime.device_names import parse_devices
        from fxpipe.schedule import Schedule
        from fxpipe.settings import usual_microbatches
        from fxpipe.show.compiling import choice_text, part_text, passes_text
        from fxpipe.show.package import package_json, package_table
        from fxpipe.show.progress import Progress
        from fxpipe.weights import refuse_valueless

        counted = count_of(microbatches)
        # Before the work rather than after it.
        refuse_loss(out)
        if save_profile is not None:
            check_profile_file(save_profile)
            if real(save_profile).is_relative_to(real(out)):
                raise InputError(
                    f"{save_profile} lies in the package {out}, which has its own files alone: "
                    "save the profile elsewhere"
                )
        used = [str(device) for device in parse_devices(devices)]
        order = Schedule.read(schedule) if schedule.endswith(".csv") else schedule
        if isinstance(order, Schedule):
            usual = order.n_microbatches
        else:
            usual = usual_microbatches(len(used), batch)
        loaded = targets.load(target)
        costs = None if profile is None else costs_of(profile)
        if is_analytic(costs):
            say(f"building without memory, since costs are {profile}: no numbers are compared")
            model = loaded.build_without_memory()
        else:
            model = loaded.build()
        inputs = loaded.inputs(batch, model)
        if weights:
            refuse_valueless(type(model).__name__, model.parameters())
        with Progress() as progress, loaded.running(f"{type(model).__name__}.forward"):
            say(choice_text(devices, used, torch.cuda.device_count()))
            package = compile_model(
                model,
                inputs.args,
                inputs.kwargs,
                devices=devices,
                loss_fn=loaded.loss,
                target=loaded.targets(batch),
                microbatches=usual if counted is None else counted,
                schedule=order,
                loops=loops,
                checkpoint=checkpoint.value,
                solver=solver.value,
                profile=costs,
                optimizer=optimizer,
                memory=memory,
                topology=topology,
                capture=capture and capture.value,
                time_limit_s=time_limit,
                seed=seed,
                workers=workers,
                allow_graph_breaks=allow_graph_breaks,
                progress=progress,
            )
        if save_profile is not None:
            write_profile(package.profile, save_profile)
        package.write(out, weights=weights, standalone=standalone)
        if verbose:
            say(passes_text(package))
        manifest, unedited = package.manifest, Edits()
        answer(package_json(manifest, unedited), package_table(manifest, unedited))
        if manifest.part is not None:
            say(part_text(manifest.part))
        say(f"wrote {out}")
