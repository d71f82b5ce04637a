"""Which buffers a forward writes, and what they held before: recomputation must see that again.

Most buffers are only read, and a copy of each for each micro-batch could be much memory, so copies
are kept of those alone that are known to be written.
"""

import torch
from torch import Tensor, nn

from fxpipe.runtime.recomputing import versions


class Written:
    """The names of the buffers that a module's forward writes; any, as long as it never ran."""

    def __init__(self) -> None:
        self.names: set[str] | None = None

    def watch(self, module: nn.Module) -> "Watch":
        """Watch a forward that begins now."""
        return Watch(self, module)


class Watch:
    """The buffers as they are when a forward begins."""

    def __init__(self, written: Written, module: nn.Module) -> None:
        self._written = written
        self._module = module
        self._before = _marked(module)
        self._copies = {
            name: buffer.clone()
            for name, (buffer, _) in self._before.items()
            if written.names is None or name in written.names
        }

    def end(self) -> dict[str, Tensor]:
        """Copies of the buffers that the forward writes, as they were before it.

        Of one that it has not written before, as it is now.
        """
        now = _marked(self._module)
        # F.batch_norm writes running statistics without telling; the count beside them tells.
        holders = {
            _holder(name)
            for name, (buffer, version) in now.items()
            if name not in self._before
            or self._before[name][0] is not buffer
            or self._before[name][1] != version
        }
        names = {name for name in now if _holder(name) in holders}
        if self._written.names is None:
            copies = self._copies.items()
            names |= {name for name, copy in copies if not torch.equal(copy, now[name][0])}
        else:
            names |= self._written.names & set(now)
        self._written.names = names
        return {
            name: self._copies[name] if name in self._copies else now[name][0].clone()
            for name in names
        }


def _marked(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """The buffers, with what changes of one that is written where autograd is told."""
    held = dict(module.named_buffers(remove_duplicate=False))
    numbers = versions(list(held.values()))
    return {name: (held[name], n) for name, n in zip(held, numbers, strict=True)}


def _holder(name: str) -> str:
    return name.rpartition(".")[0]
