"""What a class of repeated modules is called: as the user's, and by what is its own."""

from collections.abc import Collection, Iterator, Sequence
from itertools import count

# The modules that a class has, and those that it stands for.
Variant = tuple[Collection[str], Collection[str]]


def class_names(kind: str, made: Variant, others: Sequence[Variant]) -> Iterator[str]:
    """Names for a class of the user's class `kind`, the best first.

    A variant is called by a module that only it has (`BottleneckWithDownsample`), or as only those
    modules are called that it stands for (`EncDecAttention`), else it has a number.
    """
    plain = "".join(c for c in kind if c.isascii() and (c.isalnum() or c == "_")).lstrip("_")
    base = plain if plain and not plain[0].isdigit() else f"Block{plain}"
    yield base
    for theirs, _ in others:
        more = _first_names(made[0]) - _first_names(theirs)
        if len(more) == 1 and (word := _camel(more.pop())):
            yield f"{base}With{word}"
    called = _last_names(made[1])
    if len(called) == 1 and not any(called & _last_names(paths) for _, paths in others):
        yield _camel(called.pop()) or base
    yield from (f"{base}{number}" for number in count(2))


def _first_names(children: Collection[str]) -> set[str]:
    return {child.partition(".")[0] for child in children}


def _last_names(paths: Collection[str]) -> set[str]:
    return {path.rpartition(".")[2] for path in paths}


def _camel(name: str) -> str:
    """`conv_shortcut` as ConvShortcut; nothing if it is no word."""
    word = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return word if word.isascii() and word.isidentifier() else ""
