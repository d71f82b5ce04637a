"""What each rank gives to all, after word of what it was asked to do.

All ranks make the same calls in the same order. One whose loop has a batch fewer makes another one,
and would take the others' messages for those of its own: so the first that it gets says what they
are of.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.runtime.distributed.agreement import refuse_other_work
from fxpipe.runtime.distributed.progress import WORKS


def numbers(mine: Sequence[float], work: str, group: Any, first: int) -> list[list[float]]:
    """What each of `group` gives, which is asked to do `work`: as many numbers on each.

    `first` is the rank of its first one. Raises InputError, alike on all, if one does other work.
    """
    own = torch.tensor([WORKS.index(work), *mine], dtype=torch.float64)
    found = [part.tolist() for part in _gathered(own, group)]
    refuse_other_work([WORKS[int(number)] for number, *_ in found], first)
    return [rest for _, *rest in found]


def objects(mine: object, work: str, group: Any, first: int) -> list[Any]:
    """The same of anything that can be pickled."""
    written = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    lengths = [int(length) for (length,) in numbers([len(written)], work, group, first)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(written)] = written
    parts = _gathered(padded, group)
    return [
        pickle.loads(part[:length].numpy().tobytes())
        for part, length in zip(parts, lengths, strict=True)
    ]


def _gathered(own: Tensor, group: Any) -> list[Tensor]:
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group)
    return parts
