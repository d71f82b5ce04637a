"""`fxpipe timeline`: what a package's step looks like, as predicted and as it ran."""

from pathlib import Path
from typing import Annotated

import typer

from fxpipe.cli.answer import Out, answering, say
from fxpipe.errors import InputError

TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="A step that pipe.trace wrote, to show as well."),
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
        from fxpipe import view
        from fxpipe.runtime.package import read
        from fxpipe.runtime.trace import write
        from fxpipe.timeline import draw

        if picture.suffix not in (".svg", ".png", ".json"):
            raise InputError(f"{picture} must end in .svg, .png or .json, which is what is written")
        manifest = read(out)
        views = [view.predicted(manifest)]
        if trace is not None:
            views.append(view.measured(manifest, trace))
        if picture.suffix == ".json":
            measured = [event for found in views[1:] for event in found.events]
            write(picture, manifest.devices, manifest.estimate, measured)
        else:
            draw(views, picture)
        say(f"wrote {picture}")
