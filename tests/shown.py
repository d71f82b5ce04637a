"""What the command prints, as text."""

from rich.console import Console, RenderableType


def shown(table: RenderableType) -> str:
    """A table in 100 columns, without colours."""
    console = Console(width=100, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
