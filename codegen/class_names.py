"""What a class of repeated modules is called: as the user's, and what tells it from others of it."""

from collections.abc import Collection, Iterator, Sequence
from itertools import count


def class_names(
    kind: str,
    children: Collection[str],
    paths: Sequence[str],
    others: Sequence[tuple[str, Collection[str]]],
) -> Iterator[str]:
    """Names for a class of the user's class `kind`, the best first.

    `children` are the modules that it has, `paths` the modules that it stands for; `others` are
    the names of classes of the same `kind` with their modules. A variant is called by a module that
    only it has (`BottleneckWithDownsample`), or as all the modules are that it stands for
    (`EncDecAttention`), else it has a number.
    """
    plain = "".join(c for c in kind if c.isascii() and (c.isalnum() or c == "_")).lstrip("_")
    base = plain if plain and not plain[0].isdigit() else f"Block{plain}"
    yield base
    own = {child.partition(".")[0] for child in children}
    for _, theirs in others:
        more = own - {child.partition(".")[0] for child in theirs}
        if len(more) == 1 and (word := _camel(more.pop())):
            yield f"{base}With{word}"
    called = {path.rpartition(".")[2] for path in paths}
    if len(called) == 1 and len(word := _camel(called.pop())) > 3:
        yield word
    yield from (f"{base}{number}" for number in count(2))


def _camel(name: str) -> str:
    """`conv_shortcut` as ConvShortcut; nothing if it is no word."""
    word = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return word if word.isascii() and word.isidentifier() else ""
