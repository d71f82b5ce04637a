"""What `fxpipe verify` prints: how far a package is from the model, as a table and as JSON."""

import math
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape

from fxpipe.edits import Edits
from fxpipe.show.table import edits_lines, new_table
from fxpipe.show.texts import plural
from fxpipe.verify import Verification


def verification_json(result: Verification, edits: Edits) -> dict[str, Any]:
    """The verification with its verdict, and files that were edited."""
    return {"equal": result.equal, **_finite(asdict(result)), "files": asdict(edits)}


def verification_table(result: Verification, edits: Edits) -> RenderableType:
    """The largest differences of each group, files that were edited, then the verdict."""
    headings = ("compared", "tensors", "absolute", "relative", "largest in")
    table = new_table(*headings, left=(headings[0], headings[-1]))
    table.columns[-1].overflow = "fold"
    for d in result.differences:
        worst = f"missing: {', '.join(d.missing)}" if d.missing else d.worst or ""
        table.add_row(
            d.group, str(d.tensors), f"{d.absolute:.1e}", f"{d.relative:.1e}", escape(worst)
        )
    verdict = (
        f"[green]equal[/green]: all within {result.tolerance:g} relative"
        if result.equal
        else f"[red]differs[/red]: over {result.tolerance:g} relative"
    )
    m = plural(result.microbatches, "micro-batch", "es")
    notes = [*(escape(note) for note in result.notes), *edits_lines(edits)]
    return Group(table, *notes, f"{verdict} ({result.dtype}, batch {result.batch} in {m})")


def _finite(value: Any) -> Any:
    """Infinity as text: JSON has no number for it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
