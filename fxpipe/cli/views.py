"""`fxpipe timeline`, `bench` and `report`: a package's step as predicted, and as it ran."""

from pathlib import Path
from typing import Annotated

import typer

from fxpipe.cli.answer import answering, say
from fxpipe.cli.arguments import Json, Out, RunOn
from fxpipe.errors import InputError

TraceFile = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="A step that pipe.trace wrote, to show as well; once for each rank's file.",
    ),
]


def timeline_command(
    out: Out,
    picture: Annotated[
        Path, typer.Option("--out", "-o", help="What to draw: .svg, .png, or .json for Perfetto.")
    ],
    trace: TraceFile = None,
) -> None:
    """Draw the predicted step of a package, and a measured one under it."""
    with answering(as_json=False):
        from fxpipe.edits import Edits, edits
        from fxpipe.outputs import whole_file
        from fxpipe.runtime.package import read
        from fxpipe.runtime.read_json import refuse_another
        from fxpipe.runtime.trace import TRACE, write
        from fxpipe.show import measured
        from fxpipe.show.table import edits_text
        from fxpipe.show.timeline import draw

        if picture.suffix not in (".svg", ".png", ".json"):
            raise InputError(f"{picture} must end in .svg, .png or .json, which is what is written")
        if picture.suffix == ".json":
            refuse_another(picture, *TRACE)
        manifest, found = read(out), edits(out)
        views = measured.views(manifest, found, trace)
        with whole_file(picture) as file:
            if picture.suffix == ".json":
                ran = [event for view in views[1:] for event in view.events]
                write(file, dict(enumerate(manifest.devices)), manifest.estimate, ran)
            else:
                draw(views, file)
        say(f"wrote {picture}")
        # Files that are gone or new change nothing of what is drawn.
        if changed := edits_text(Edits(edited=found.edited)):
            say(f"{changed}; what is predicted is the step that was compiled")


def bench_command(
    out: Out,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="Whose inputs, weights and loss to run. [default: random inputs, a mean as loss]",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 10,
    devices: RunOn = None,
    as_json: Json = False,
) -> None:
    """Run training steps of a package, and compare them with what was predicted."""
    with answering(as_json) as answer:
        from fxpipe import target as targets
        from fxpipe.bench import bench
        from fxpipe.show.comparison import comparison_json, comparison_table

        loaded = None if target is None else targets.load(target)
        found = bench(out, loaded, steps=steps, devices=devices)
        facts = {"steps": found.steps, "figures": comparison_json(found.figures)}
        answer({**facts, "notes": list(found.notes)}, comparison_table(found.figures))
        for note in found.notes:
            say(note)


def report_command(
    out: Out,
    page: Annotated[Path, typer.Option("--out", "-o", help="The page to write, an .html.")],
    trace: TraceFile = None,
) -> None:
    """Write a page that shows a package: stages, cuts, its step, memory, predictions."""
    with answering(as_json=False):
        from fxpipe.edits import edits
        from fxpipe.outputs import whole_file
        from fxpipe.runtime.package import read
        from fxpipe.show import measured
        from fxpipe.show import page as pages

        if page.suffix != ".html":
            raise InputError(f"{page} must end in .html, which is what is written")
        manifest, found = read(out), edits(out)
        views = measured.views(manifest, found, trace)
        with whole_file(page) as file:
            file.write_text(pages.page(manifest, found, views), encoding="utf-8")
        say(f"wrote {page}")
