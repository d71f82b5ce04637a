"""Skip connections between layers that are not neighbours: `torchgpipe.skip`."""

from fxpipe.compat.skip.namespace import Namespace
from fxpipe.compat.skip.skippable import pop, skippable, stash
from fxpipe.compat.skip.verify import verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
