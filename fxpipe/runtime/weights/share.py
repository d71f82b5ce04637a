"""A pipeline with the parameters and buffers of a model at hand in the place of its own."""

from torch import nn

from fxpipe.runtime.pipeline import Pipeline
from fxpipe.runtime.swapping import holder_of
from fxpipe.runtime.weights.state import put, shell


def share(pipe: Pipeline, model: nn.Module) -> None:
    """Let `pipe` compute with the very tensors of `model`, in the modes of its modules.

    An optimizer over the model's parameters trains the pipeline, and the other way round. Where a
    stage's device is another one than a parameter's, the parameter moves there, in place. What
    other processes hold goes from `model`.
    """
    for spec in pipe.manifest.state:
        if spec.name not in pipe._elsewhere:
            put(pipe, spec.name, getattr(holder_of(model, spec.name), spec.name.rpartition(".")[2]))
        elif spec.kind != "constant":
            put(model, spec.name, None)
    pipe._state.bind(pipe)
    follow_modes(pipe, model)


def held_by(model: nn.Module, pipe: Pipeline) -> list[object]:
    """What `model` has of the state that the two share, None for what it lacks now."""
    names = [spec.name for spec in pipe.manifest.state if spec.name not in pipe._elsewhere]
    return [getattr(holder_of(model, name), name.rpartition(".")[2], None) for name in names]


def follow_modes(pipe: Pipeline, model: nn.Module) -> None:
    """Set train or eval mode as each module of `model` has it."""
    for stage in pipe._stages:
        stage.module.training = model.training
    pipe.training = model.training
    for path, module in model.named_modules():
        if path:
            own = shell(pipe, path)
            for each in (own, *own._twins):
                each.training = module.training
