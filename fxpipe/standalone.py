"""The runtime copied into a package, which then runs where only torch is installed."""

import re
from collections.abc import Mapping
from pathlib import Path

_FXPIPE = Path(__file__).parent
_FOLDER = "_fxpipe"
_IMPORT = re.compile(r"^( *from )fxpipe(?:\.([\w.]+))?( import )", re.MULTILINE)


def with_runtime(files: Mapping[str, str]) -> dict[str, str]:
    """`files` and the runtime beside them in `_fxpipe`, from where all of them now import it."""
    sources = [
        _FXPIPE / "errors.py",
        _FXPIPE / "schedule.py",
        _FXPIPE / "schedule_check.py",
        *_FXPIPE.glob("runtime/**/*.py"),
    ]
    copies = {
        path.relative_to(_FXPIPE).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(sources)
    }
    copies["__init__.py"] = '"""fxpipe\'s runtime, as it was when this package was written."""\n'
    own = {name: _relative(text, f".{_FOLDER}") for name, text in files.items()}
    runtime = {
        f"{_FOLDER}/{name}": _relative(text, "." * len(Path(name).parts))
        for name, text in copies.items()
    }
    return own | runtime


def _relative(text: str, home: str) -> str:
    """`text` with imports from fxpipe made imports from `home`, its place seen from the file."""

    def rewritten(found: re.Match[str]) -> str:
        begin, module, end = found.groups()
        dot = "" if home.endswith(".") or module is None else "."
        return f"{begin}{home}{dot}{module or ''}{end}"

    return _IMPORT.sub(rewritten, text)
