"""`fxpipe inspect` and `fxpipe verify`: what a package is, and whether it equals the model."""

from enum import StrEnum
from typing import Annotated

import typer

from fxpipe.cli.answer import DIFFERS, Json, Out, TargetText, answering


class DtypeName(StrEnum):
    """Precisions to verify in."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"


def inspect_command(out: Out, as_json: Json = False) -> None:
    """Show the stages, values and predictions of a package."""
    with answering(as_json) as answer:
        from fxpipe.edits import edits
        from fxpipe.runtime.package import read
        from fxpipe.show.package import package_json, package_table

        manifest, found = read(out), edits(out)
        answer(package_json(manifest, found), package_table(manifest, found))


def verify_command(
    out: Out,
    target: TargetText,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows. [default: as compiled]")] = None,
    dtype: Annotated[DtypeName, typer.Option()] = DtypeName.FLOAT64,
    as_json: Json = False,
) -> None:
    """Compare outputs, gradients and buffers of a package with those of the plain model."""
    with answering(as_json) as answer:
        from fxpipe import target as targets
        from fxpipe.edits import edits
        from fxpipe.show.verification import verification_json, verification_table
        from fxpipe.verify import verify

        result = verify(out, targets.load(target), batch=batch, dtype=dtype.value)
        found = edits(out)
        answer(verification_json(result, found), verification_table(result, found))
        if not result.equal:
            raise typer.Exit(DIFFERS)
