"""Tables in Markdown: whole, or line by line as things are measured."""

from collections.abc import Collection, Iterable, Sequence


def table(
    titles: Sequence[str], rows: Iterable[Iterable[object]], text: Collection[str] = ()
) -> str:
    """All of it. The first column and those named in `text` go to the left, others to the right."""
    return "\n".join([head(titles, text), *map(line, rows)])


def head(titles: Sequence[str], text: Collection[str] = ()) -> str:
    """What stands above the rows."""
    left = {titles[0], *text}
    return f"{line(titles)}\n{line('---' if title in left else '---:' for title in titles)}"


def line(cells: Iterable[object]) -> str:
    """A row."""
    return f"| {' | '.join(map(str, cells))} |"
