"""The command `fxpipe`: a module for each group of commands, which are all named here.

Exit codes: 0 done, 1 the answer is no (verify found a difference), 2 wrong use or wrong input,
3 fxpipe itself failed, 130 interrupted. Nothing heavy is imported before a command runs, so that
`--help` is quick.
"""

from typing import Annotated

import typer

from fxpipe import __version__
from fxpipe.cli.check import inspect_command, verify_command
from fxpipe.cli.compile import compile_command
from fxpipe.cli.plan import plan_command
from fxpipe.cli.profile import profile_command
from fxpipe.cli.views import bench_command, report_command, timeline_command

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fxpipe {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Which it is.")
    ] = False,
) -> None:
    """A compiler for pipeline parallelism in PyTorch."""


app.command("compile")(compile_command)
app.command("plan")(plan_command)
app.command("profile")(profile_command)
app.command("inspect")(inspect_command)
app.command("verify")(verify_command)
app.command("timeline")(timeline_command)
app.command("bench")(bench_command)
app.command("report")(report_command)


def main() -> None:
    """Entry point of the command."""
    app()
