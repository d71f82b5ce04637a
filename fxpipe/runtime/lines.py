"""The line of a stage's file that an error was raised at, or below."""

import linecache
import traceback


def line_of(error: BaseException, path: str, compiled: bool = False) -> str:
    """`, line N` of the file at `path`, with its text; nothing if the error is from elsewhere.

    With `compiled` code of torch.compile runs in the file's frames, which all stand at their `def`.
    """
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == path
        and not (compiled and line == frame.f_code.co_firstlineno)
    ]
    # What Dynamo raises while it traces has the stage's own frames in `real_stack`.
    traced = getattr(error, "real_stack", None) or ()
    lines += [frame.lineno for frame in traced if frame.filename == path and frame.lineno]
    if not lines:
        return ""
    linecache.checkcache(path)  # the file may have been edited since
    return f", line {lines[-1]}: `{linecache.getline(path, lines[-1]).strip()}`"
