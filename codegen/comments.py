"""Comments of a body: where each group of lines comes from, and the shapes of results."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

from fxpipe.codegen.names import plain
from fxpipe.codegen.wording import assigned_word
from fxpipe.ir import SourceLine

LINE = 88  # columns that ruff leaves to a line if nobody tells it otherwise
WIDTH = LINE - 8  # of one in a method


@dataclass(frozen=True, slots=True)
class Line:
    """Code, a comment, or both; `spec` is the shape of what the code makes, told behind those."""

    code: str = ""
    comment: str = ""
    spec: str = ""

    def __str__(self) -> str:
        told = ": ".join(part for part in (self.comment, self.spec) if part)
        comment = f"# {told}" if told else ""
        return f"{self.code}  {comment}" if self.code.strip() and comment else self.code + comment

    @property
    def fits(self) -> bool:
        """Whether ruff leaves code and comment on one line."""
        return len(str(self)) <= WIDTH

    def fitted(self) -> list["Line"]:
        """The code with what there is room for; the comment stands above it if need be."""
        code = replace(self, spec="")
        if self.fits:
            return [self]
        if code.fits or not self.comment:
            return [code]
        indent = self.code[: len(self.code) - len(self.code.lstrip())]
        return [Line(indent, self.comment), Line(self.code)]


@dataclass(slots=True)
class Comments:
    """Says a module once, where it changes, and its file with it; a shape where it changes.

    The text of a line of the user's is told once, then its number alone.

    `prefix` is the path of the class's module, which its docstring names together with `file`.
    """

    prefix: str
    file: str
    _module: str = ""
    _spec: str = ""
    _told: set[SourceLine] = field(default_factory=set)

    def around(
        self, module: str, source: object, lines: Sequence[Line], first: Sequence[Line]
    ) -> Iterator[Line]:
        """`lines`, which are of the user's line `source` in the forward of `module`.

        `first` are lines of ours that stand before them.
        """
        code = [line.code for line in lines if line.code.strip()]
        indent = " " * (len(code[0]) - len(code[0].lstrip())) if code else ""
        said = ""
        if isinstance(source, SourceLine) and code:
            own = module.removeprefix(self.prefix).removeprefix(".")
            if own != self._module or not self.file:
                yield Line()
                yield Line(indent, plain(" in ".join(p for p in (own, source.file) if p)))
                self._module, self.file = own, source.file
            said = f"line {source.line}"
            if source.file != self.file:
                said = plain(f"{source.file.rpartition('/')[2]}:{source.line}")
        yield from first
        told = source in self._told
        if isinstance(source, SourceLine) and said and not told and not _alike(source.text, code):
            self._told.add(source)
            yield Line(indent, plain(shortened(f"{said}: {source.text}", WIDTH - 2)))
            said = ""
        for line in lines:
            yield from self._commented(replace(line, comment=plain(said), spec=plain(line.spec)))
            said = ""

    def _commented(self, line: Line) -> list[Line]:
        """The line with what there is room for, the shape left out that stands above it anyway."""
        lines = (replace(line, spec="") if line.spec == self._spec else line).fitted()
        self._spec = lines[-1].spec or self._spec
        return lines


def shortened(text: str, width: int) -> str:
    """The beginning of `text`, if it is too long."""
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."


def _alike(text: str, code: Sequence[str]) -> bool:
    """Whether the code says what the user's line said, so that it needs no repeating.

    Of a call over several lines the first is known, which says what the result is called.
    """
    assigned = assigned_word(text) if text.endswith("(") else None
    if assigned is not None and re.match(rf"\s*{assigned}(_\d+)? = ", code[-1]):
        return True
    theirs = "".join(text.split())
    ours = ("".join("".join(lines).split()) for lines in (code, *([line] for line in code)))
    return any(SequenceMatcher(None, one, theirs, autojunk=False).ratio() > 0.5 for one in ours)
