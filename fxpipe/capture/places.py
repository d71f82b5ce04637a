"""Where in the user's code something happens, in words."""

import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_HERE = str(Path(__file__).parent.parent) + os.sep


def user_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame that is neither torch's nor ours."""
    return next(reversed(user_frames(stack)), None)


def user_frames(stack: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames that are neither torch's nor ours, outermost first."""
    ours = (_TORCH, _HERE, "<")
    return [frame for frame in stack if not frame.filename.startswith(ours)]


def parse_stack(text: str) -> list[traceback.FrameSummary]:
    """The frames in a stack trace that torch keeps as text."""
    found = re.finditer(r'File "([^"]+)", line (-?\d+), in ([^\n]+)\n([^\n]*)', text)
    return [
        traceback.FrameSummary(file, int(line), name, lookup_line=False, line=code)
        for file, line, name, code in (match.groups() for match in found)
    ]


def user_place(error: BaseException) -> str:
    """Where in the user's code `error` arose, in words."""
    return place_text(user_frame(traceback.extract_tb(error.__traceback__)))


def place_of(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost frame of the user's, in words."""
    return place_text(user_frame(stack))


def place_text(frame: traceback.FrameSummary | None) -> str:
    """A frame in words; None is one that is not known."""
    if frame is None:
        return "in the model's forward"
    return f"at {frame.filename}, line {frame.lineno}: {(frame.line or '').strip()}"
