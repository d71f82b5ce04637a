"""`fxpipe profile`: what a model's ops and the links between devices cost, kept in a file."""

from pathlib import Path
from typing import Annotated

import typer

from fxpipe.cli.answer import answering, say
from fxpipe.cli.arguments import BATCH, Json, TargetText


def profile_command(
    target: TargetText,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.")],
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            help="A count, or a list as in cuda:0,cuda:1 and cpu*4 [default: every GPU, or cpu*2]",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a training step.")] = BATCH,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="[default: as for compile]"),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="analytic:DEVICE",
            help="Work the costs out for a device such as analytic:h100 instead.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the ops of TARGET and the links between devices, for `compile --profile FILE`."""
    with answering(as_json) as answer:
        from fxpipe import target as targets
        from fxpipe.costing import costed
        from fxpipe.costs.criterion import Loss
        from fxpipe.costs.devices import device_named
        from fxpipe.costs.profile_file import check_profile_file, save_profile
        from fxpipe.runtime.device_names import all_devices, parse_devices
        from fxpipe.settings import usual_microbatches
        from fxpipe.show import profile as report_profile
        from fxpipe.show.progress import Progress

        # Before the work rather than after it.
        check_profile_file(out)
        if profile is not None:
            device_named(profile)
        used = all_devices() if devices is None else parse_devices(devices)
        loaded = targets.load(target)
        model = loaded.build() if profile is None else loaded.build_without_memory()
        inputs = loaded.inputs(batch, model)
        with Progress() as progress, loaded.running(f"{type(model).__name__}.forward"):
            _, costs = costed(
                model,
                inputs.args,
                inputs.kwargs,
                devices=used,
                counts=(microbatches or usual_microbatches(len(used), batch),),
                loss=Loss.of(loaded.loss, loaded.targets(batch)),
                profile=profile,
                progress=progress,
            )
        (found,) = costs.values()
        save_profile(found, out)
        answer(report_profile.profile_json(found), report_profile.profile_table(found))
        say(f"wrote {out}")
