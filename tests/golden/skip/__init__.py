"""Skip as a pipeline of 3 stages, written by fxpipe 0.1.0.

    import out

    pipe = out.load()
    pipe.load_weights("model.safetensors")  # or pipe.load_state_dict(model.state_dict())
    loss = pipe.step(inputs, target=targets, loss_fn=loss_fn)

stage_*.py are the stages, schedule.csv says what each device does when, plan.json how values go
between them and what that is predicted to cost. The keys of weights are the original model's; if
there is a folder `weights`, load() has loaded what is in it.
"""

from pathlib import Path
from typing import Any

from fxpipe.runtime import Devices, Pipeline
from fxpipe.runtime import load as _load


def load(devices: Devices | None = None, **options: Any) -> Pipeline:
    """The pipeline on `devices` ("cpu*2", "cuda:0,cuda:1"); those it was planned for if None.

    `options` are those of `fxpipe.load`.
    """
    return _load(Path(__file__).parent, devices, **options)
