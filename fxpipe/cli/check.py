"""`fxpipe inspect` and `fxpipe verify`: what a package is, and whether it equals the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fxpipe.cli.answer import DIFFERS, answering
from fxpipe.cli.arguments import Json, Out, RunOn, TargetText
from fxpipe.errors import PackageError


class DtypeName(StrEnum):
    """Precisions to verify in."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"


@contextmanager
def _telling_edits(out: Path) -> Iterator[None]:
    """What can't be read may be what was edited."""
    try:
        yield
    except PackageError as error:
        from fxpipe.edits import edits
        from fxpipe.show.table import edits_text

        try:
            changed = edits_text(edits(out))
        except PackageError:
            raise error from None
        raise PackageError(f"{error}\n{changed}".rstrip()) from error


def inspect_command(out: Out, as_json: Json = False) -> None:
    """Show the stages, values and predictions of a package."""
    with answering(as_json) as answer:
        from fxpipe.edits import edits
        from fxpipe.runtime.package import read
        from fxpipe.show.package import package_json, package_table

        with _telling_edits(out):
            manifest = read(out)
        found = edits(out)
        answer(package_json(manifest, found), package_table(manifest, found))


def verify_command(
    out: Out,
    target: TargetText,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows. [default: as compiled]")] = None,
    dtype: Annotated[DtypeName, typer.Option()] = DtypeName.FLOAT64,
    devices: RunOn = None,
    as_json: Json = False,
) -> None:
    """Compare outputs, gradients and buffers of a package with those of the plain model."""
    with answering(as_json) as answer:
        from fxpipe import target as targets
        from fxpipe.edits import edits
        from fxpipe.show.verification import verification_json, verification_table
        from fxpipe.verify import verify

        loaded = targets.load(target)
        with _telling_edits(out):
            result = verify(out, loaded, batch=batch, dtype=dtype.value, devices=devices)
        found = edits(out)
        answer(verification_json(result, found), verification_table(result, found))
        if not result.equal:
            raise typer.Exit(DIFFERS)
