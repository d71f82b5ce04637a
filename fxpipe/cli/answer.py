"""How a command answers: its output, its errors and exit codes."""

import contextlib
import importlib
import json
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from fxpipe.errors import FxpipeError, InputError, MixedRowsWarning

if TYPE_CHECKING:
    from rich.console import RenderableType

DIFFERS, WRONG_INPUT, FAILED = 1, 2, 3


class Answer:
    """Prints a command's result to the real standard output, as JSON or as a table."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.stdout = sys.stdout

    def __call__(self, facts: dict[str, Any], table: "RenderableType") -> None:
        """The facts as JSON, or the table."""
        if self.as_json:
            self.stdout.write(json.dumps(facts, indent=2) + "\n")
            return
        from rich.console import Console

        console = Console(file=self.stdout, highlight=False)
        if not console.is_terminal:
            console.width = max(console.width, 100)
        console.print(table)


@contextlib.contextmanager
def answering(as_json: bool) -> Iterator[Answer]:
    """Run a command: its errors become one message and an exit code.

    What the user's model prints goes to standard error, so that standard output holds the answer.
    """
    answer = Answer(as_json)
    _import_torch()
    try:
        if as_json and answer.stdout is None:
            raise InputError("standard output is closed: give --json a place to write to")
        with contextlib.redirect_stdout(sys.stderr), _warning_in_a_line():
            yield answer
    except FxpipeError as error:
        say(f"error: {error}")
        raise typer.Exit(WRONG_INPUT) from error
    except OSError as error:
        say(f"error: {error}")
        raise typer.Exit(WRONG_INPUT) from error
    except typer.Exit:
        raise
    except Exception as error:
        traceback.print_exc()
        say("fxpipe failed: this is a bug in fxpipe, not in your model. Please report it.")
        raise typer.Exit(FAILED) from error


def _import_torch() -> None:
    """Ended at once by an interrupt, of which torch would make an import of numpy that failed."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module("torch")
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _warning_in_a_line() -> Iterator[None]:
    """Of a warning of ours, the place it comes from is none of the user's."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **file: Any) -> None:
            if issubclass(category, MixedRowsWarning):
                say(f"warning: {message}")
            else:
                others(message, category, *place, **file)

        warnings.showwarning = show
        yield


def say(text: str) -> None:
    """Tell what is no answer, on standard error."""
    typer.echo(text, err=True)
