"""Comments of a body: where each group of lines comes from, and the shapes of results."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from fxpipe.codegen.names import plain
from fxpipe.codegen.wording import assigned_word
from fxpipe.ir import SourceLine

LINE = 88  # columns that ruff leaves to a line if nobody tells it otherwise
WIDTH = LINE - 8  # of one in a method


@dataclass(frozen=True, slots=True)
class Line:
    """Code, a comment, or both."""

    code: str = ""
    comment: str = ""

    def __str__(self) -> str:
        comment = f"# {self.comment}" if self.comment else ""
        return f"{self.code}  {comment}" if self.code.strip() and comment else self.code + comment

    @property
    def fits(self) -> bool:
        """Whether ruff leaves code and comment on one line."""
        return len(str(self)) <= WIDTH


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
            yield from self._commented(line.code, said, line.comment)
            said = ""

    def _commented(self, code: str, said: str, spec: str) -> Iterator[Line]:
        """The code with what there is room for; the user's line stands above it if need be."""
        spec = spec if spec != self._spec else ""
        whole = Line(code, plain(": ".join(part for part in (said, spec) if part)))
        if whole.fits:
            self._spec = spec or self._spec
            yield whole
        elif Line(code, said).fits:
            yield Line(code, said)
        else:
            if said:
                yield Line(code[: len(code) - len(code.lstrip())], said)
            yield Line(code)


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
