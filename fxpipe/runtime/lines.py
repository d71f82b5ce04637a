"""The line of a stage's file that an error was raised at, or below."""

import linecache
import traceback


def line_of(error: BaseException, path: str) -> str:
    """`, line N` of the file at `path`, with its text; nothing if the error is from elsewhere."""
    # What Dynamo raises while it traces has the stage's own frames in `real_stack`.
    traced = getattr(error, "real_stack", None) or ()
    frames = [*traceback.extract_tb(error.__traceback__), *traced]
    lines = [frame.lineno for frame in frames if frame.filename == path and frame.lineno]
    if not lines:
        return ""
    linecache.checkcache(path)  # the file may have been edited since
    return f", line {lines[-1]}: `{linecache.getline(path, lines[-1]).strip()}`"
