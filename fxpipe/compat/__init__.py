"""torchgpipe's and PyTorch's `Pipe` on the runtime of fxpipe: change the import, nothing else.

    from fxpipe.compat import GPipe  # was: from torchgpipe import GPipe
    from fxpipe.compat import Pipe  # was: from torch.distributed.pipeline.sync import Pipe

Modules have the names that theirs have below `torchgpipe` and `torch.distributed.pipeline.sync`.
Names, arguments and behaviour are after torchgpipe 0.0.7 and PyTorch 1.12; docs/compat.md says
what differs.
"""

from fxpipe.compat.gpipe import GPipe
from fxpipe.compat.microbatch import NoChunk
from fxpipe.compat.pipe import Pipe, WithDevice
from fxpipe.runtime.recomputing import is_checkpointing, is_recomputing

__all__ = ["GPipe", "NoChunk", "Pipe", "WithDevice", "is_checkpointing", "is_recomputing"]
