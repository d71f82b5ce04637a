"""What the tables that the command prints have in common."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from fxpipe.edits import Edits


def new_table(*headings: str, left: Sequence[str] = ()) -> Table:
    """An empty table; its columns are flush right, but for those `left`."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


def spaced(sections: Sequence[RenderableType]) -> Group:
    """All of them, an empty line between two."""
    return Group(*[part for section in sections for part in ("", section)][1:])


def edits_text(edits: Edits) -> str:
    """A line that tells which files are no longer as they were written; empty if all are."""
    changed = [f"{how} {', '.join(names)}" for how, names in asdict(edits).items() if names]
    return f"files: {'; '.join(changed)}" if changed else ""


def edits_lines(edits: Edits) -> list[str]:
    """The same for a table, if there are such files."""
    return [escape(text)] if (text := edits_text(edits)) else []
