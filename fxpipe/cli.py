"""The command `fxpipe`: compile a model, inspect a package, verify it against the model.

Exit codes: 0 done, 1 the answer is no (verify found a difference), 2 wrong use or wrong input,
3 fxpipe itself failed. Nothing heavy is imported before a command runs, so that `--help` is quick.
"""

import contextlib
import json
import sys
import traceback
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxpipe.errors import FxpipeError

if TYPE_CHECKING:
    from rich.console import RenderableType

_DIFFERS, _WRONG_INPUT, _FAILED = 1, 2, 3

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A compiler for pipeline parallelism in PyTorch.",
)


class ScheduleName(StrEnum):
    """Schedules that a step can follow."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    BFS = "bfs"
    ZB_H1 = "zb-h1"


class CheckpointName(StrEnum):
    """Micro-batches whose activations are recomputed in backward."""

    NEVER = "never"
    EXCEPT_LAST = "except_last"
    ALWAYS = "always"


class SolverName(StrEnum):
    """Ways to find the cuts."""

    DP = "dp"
    BEAM = "beam"
    CPSAT = "cpsat"


class DtypeName(StrEnum):
    """Precisions to verify in."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"


TargetText = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="model.py, model.py:factory or package.module:factory"),
]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="A package that `compile` wrote.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")]


@app.command("compile")
def compile_command(
    target: TargetText,
    devices: Annotated[str, typer.Option(help="A count, or a list as in cuda:0,cuda:1 and cpu*4.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The package's folder.")],
    batch: Annotated[int, typer.Option(min=1, help="Rows of a training step.")] = 8,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="[default: twice the devices, at most the batch]"),
    ] = None,
    schedule: Annotated[ScheduleName, typer.Option()] = ScheduleName.ONE_F_ONE_B,
    loops: Annotated[
        int | None,
        typer.Option(min=1, help="Stages a device [default: 2 under interleaved and bfs, else 1]"),
    ] = None,
    checkpoint: Annotated[
        CheckpointName, typer.Option(help="Micro-batches that are recomputed in backward.")
    ] = CheckpointName.NEVER,
    solver: Annotated[SolverName, typer.Option(help="How cuts are found.")] = SolverName.DP,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|analytic:DEVICE",
            help="Take the times of ops from this file, or work them out for a device such as "
            "analytic:h100: then the model is built without memory.",
        ),
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="Write the measured times of ops to this file.")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Write the model's values too, as safetensors.")
    ] = False,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Copy the runtime too: torch alone runs it.")
    ] = False,
    allow_graph_breaks: Annotated[
        bool,
        typer.Option(
            "--allow-graph-breaks",
            help="If the model can't be captured as one graph, pipeline its largest part.",
        ),
    ] = False,
    as_json: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show each pass's time and result.")
    ] = False,
) -> None:
    """Compile the model of TARGET into a package of pipeline stages."""
    with _answering(as_json) as answer:
        import torch

        from fxpipe import report
        from fxpipe import target as targets
        from fxpipe.compiler import compile as compile_model
        from fxpipe.edits import Edits, refuse_loss
        from fxpipe.profile_file import costs_of, is_analytic
        from fxpipe.profile_file import save_profile as write_profile
        from fxpipe.progress import Progress
        from fxpipe.runtime.stream import parse_devices
        from fxpipe.weights import refuse_valueless

        refuse_loss(out)  # before the work rather than after it
        used = [str(device) for device in parse_devices(devices)]
        loaded = targets.load(target)
        costs = None if profile is None else costs_of(profile)
        inputs = loaded.inputs(batch)
        if is_analytic(costs):
            _say(f"building without memory, since costs are {profile}: no numbers are compared")
            model = loaded.build_without_memory()
        else:
            model = loaded.build()
        if weights:
            refuse_valueless(type(model).__name__, model.parameters())
        with Progress() as progress, loaded.running(f"{type(model).__name__}.forward"):
            _say(report.choice_text(devices, used, torch.cuda.device_count()))
            package = compile_model(
                model,
                inputs.args,
                inputs.kwargs,
                devices=devices,
                microbatches=microbatches or min(batch, 2 * len(used)),
                schedule=schedule.value,
                loops=loops,
                checkpoint=checkpoint.value,
                solver=solver.value,
                profile=costs,
                allow_graph_breaks=allow_graph_breaks,
                progress=progress,
            )
        if save_profile is not None:
            write_profile(package.profile, save_profile)
        package.write(out, weights=weights, standalone=standalone)
        if verbose:
            _say(report.passes_text(package))
        unedited = Edits()
        answer(
            report.package_json(package.manifest, unedited),
            report.package_table(package.manifest, unedited),
        )
        if package.manifest.part is not None:
            _say(report.part_text(package.manifest.part))
        _say(f"wrote {out}")


@app.command("inspect")
def inspect_command(out: Out, as_json: Json = False) -> None:
    """Show the stages, values and predictions of a package."""
    with _answering(as_json) as answer:
        from fxpipe import report
        from fxpipe.edits import edits
        from fxpipe.runtime.package import read

        manifest, found = read(out), edits(out)
        answer(report.package_json(manifest, found), report.package_table(manifest, found))


@app.command("verify")
def verify_command(
    out: Out,
    target: TargetText,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows. [default: as compiled]")] = None,
    dtype: Annotated[DtypeName, typer.Option()] = DtypeName.FLOAT64,
    as_json: Json = False,
) -> None:
    """Compare outputs, gradients and buffers of a package with those of the plain model."""
    with _answering(as_json) as answer:
        from fxpipe import report
        from fxpipe import target as targets
        from fxpipe.edits import edits
        from fxpipe.verify import verify

        result = verify(out, targets.load(target), batch=batch, dtype=dtype.value)
        found = edits(out)
        answer(report.verification_json(result, found), report.verification_table(result, found))
        if not result.equal:
            raise typer.Exit(_DIFFERS)


class _Answer:
    """Prints a command's result to the real standard output, as JSON or as a table."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.stdout = sys.stdout

    def __call__(self, facts: dict[str, Any], table: "RenderableType") -> None:
        if self.as_json:
            self.stdout.write(json.dumps(facts, indent=2) + "\n")
            return
        from rich.console import Console

        console = Console(file=self.stdout, highlight=False)
        if not console.is_terminal:
            console.width = max(console.width, 100)
        console.print(table)


@contextlib.contextmanager
def _answering(as_json: bool) -> Iterator[_Answer]:
    """Run a command: its errors become one message and an exit code.

    What the user's model prints goes to standard error, so that standard output holds the answer.
    """
    answer = _Answer(as_json)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield answer
    except FxpipeError as error:
        _say(f"error: {error}")
        raise typer.Exit(_WRONG_INPUT) from error
    except OSError as error:
        _say(f"error: {error}")
        raise typer.Exit(_WRONG_INPUT) from error
    except typer.Exit:
        raise
    except Exception as error:
        traceback.print_exc()
        _say("fxpipe failed: this is a bug in fxpipe, not in your model. Please report it.")
        raise typer.Exit(_FAILED) from error


def _say(text: str) -> None:
    typer.echo(text, err=True)


def main() -> None:
    """Entry point of the command."""
    app()
