"""The errors a user can meet. Each message names the rule, the numbers and the way out.

All derive from `FxpipeError`, which the command turns into one clear message and exit code 2.
"""


class FxpipeError(Exception):
    """Base of every error that fxpipe raises on purpose."""


class TargetError(FxpipeError):
    """The file or module given as TARGET lacks something or can't be imported.

    Fails:   a `model.py` without `build`
    Repaired: `def build() -> nn.Module: ...` and `def inputs(batch): ...` in it
    """


class InputError(FxpipeError):
    """Inputs that don't fit the model, the batch or the compiled pipeline.

    Fails:   `pipe(x)` with 5 features a row, where the model was compiled with 6
    Repaired: an `x` with 6
    """


class CaptureError(FxpipeError):
    """The model can't be captured as one graph, or the graph does not compute what it does.

    Fails:   `if x.sum() > 0:` in forward
    Repaired: `torch.where`, or that part kept outside the pipelined model
    """


class DeviceError(FxpipeError):
    """A device list that can't be read or isn't there.

    Fails:   `--devices cuda:0,cuda:7` on a machine with two GPUs
    Repaired: `--devices cuda:0,cuda:1`, or `--devices cpu*2`
    """


class PlanError(FxpipeError):
    """No partition satisfies what was asked for.

    Fails:   `--devices 64` for a model of 20 blocks
    Repaired: at most 20 devices
    """


class ScheduleError(FxpipeError):
    """A schedule table that breaks a rule: an action missing, twice, out of order, or a deadlock.

    Fails:   a row `0B0,0F0`
    Repaired: `0F0,0B0`
    """


class PackageError(FxpipeError):
    """A package on disk that isn't ours, or whose files no longer fit each other.

    Fails:   a `plan.json` edited so that a stage expects a value its file does not take
    Repaired: the same edit in the stage file, or the package compiled anew
    """


class WeightsError(FxpipeError):
    """A state_dict whose keys or shapes are not the pipeline's: nothing has been loaded.

    Or something in a pipeline's tree that its stages weren't compiled for: nothing has run.
    """


class StageError(FxpipeError):
    """A stage raised: the message says which stage, micro-batch and line of the stage file."""


class MixedRowsWarning(UserWarning):
    """What forward gives for a row hangs on other rows, of which a micro-batch has fewer.

    Warns:    `h - h.mean(0)`, `h.roll(1, 0)` or `h.flip(0)` in forward
    Repaired: that done behind the pipeline, or one micro-batch
    """
