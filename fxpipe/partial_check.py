"""Whether a model gives the same with a part of it apart, as a pipeline will run that.

Of the part the rest then sees what it returns alone: no attribute that it leaves behind, and of
what several modules are given, what it is when the last one is called.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fxpipe.capture.check import Result, compare, observed
from fxpipe.capture.inputs import copies
from fxpipe.capture.names import model_names
from fxpipe.memory import lacks_memory
from fxpipe.ops.contents import Contents
from fxpipe.ops.interpret import untouched
from fxpipe.runtime.manifest import PartSpec
from fxpipe.runtime.splicing import stand_in
from fxpipe.runtime.structure import describe


def stands_apart(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modules: Sequence[nn.Module],
    spec: PartSpec,
    part: Callable[..., Any],
) -> bool:
    """Whether outputs and gradients are the model's if `part` computes what `modules` do.

    Of a model without memory, no numbers can be compared: it is taken to be so.
    """
    if lacks_memory(model):
        return True
    state = model_names(model).state

    def apart(**given: Any) -> Any:
        forwards = [vars(module).pop("forward") for module in modules]
        held = Contents(model, state)
        try:
            return part(**given)
        finally:
            held.put_back()
            for module, forward in zip(modules, forwards, strict=True):
                module.forward = forward

    def result() -> Result:
        given, named = tree_map_only(Tensor, lambda tensor: copies([tensor])[0], (args, kwargs))
        with untouched(model, state):
            model.train()
            found = observed(lambda: describe(model(*given, **named))[1], model, state)
        return replace(found, buffers={})  # the part's are the pipeline's

    expected = result()
    stand_in(modules, spec, apart)
    try:
        return compare(expected, result()) is None
    except Exception:  # what the rest reads is not there
        return False
    finally:
        for module in modules:
            del module.forward
