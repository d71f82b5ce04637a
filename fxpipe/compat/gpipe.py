"""torchgpipe's `GPipe`."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.compat import partitioned
from fxpipe.compat.microbatch import scatter
from fxpipe.compat.partitioned import Partitioned
from fxpipe.compat.skip import verify_skippables
from fxpipe.runtime.batchnorm import DeferredBatchNorm

Device = torch.device | int | str


class GPipe(Partitioned):
    """An `nn.Sequential` in partitions of consecutive layers, `balance[j]` layers on `devices[j]`.

    It takes and returns what the Sequential does: a tensor, or a tuple of tensors, with the
    mini-batch in dimension 0. Partitions too pass on nothing else. Arguments are torchgpipe's:

    - `devices`: by default all CUDA devices;
    - `chunks`: how many micro-batches a mini-batch is cut into;
    - `checkpoint`: which of them are computed again in backward, in training: 'always',
      'except_last' or 'never';
    - `deferred_batch_norm`: whether running statistics are those of mini-batches.

    Raises TypeError for what is no Sequential or has skips that do not match, ValueError for wrong
    arguments, IndexError for too few devices.
    """

    #: The number of layers in each partition.
    balance: list[int]

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__(chunks, checkpoint)
        if balance is None:
            raise ValueError(_advised("balance is required"))
        verify_module(module)
        verify_skippables(module)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        self.balance = list(balance)
        if sum(self.balance) != len(module) or any(n <= 0 for n in self.balance):
            raise ValueError(
                _advised(
                    f"balance {self.balance} does not fit the module's {len(module)} layers: give "
                    "positive numbers that add up to as many"
                )
            )
        if devices is None:
            devices = range(torch.cuda.device_count())
        places = [torch.device(device) for device in devices][: len(self.balance)]
        if len(places) < len(self.balance):
            raise IndexError(
                f"too few devices to hold given partitions (devices: {len(places)}, partitions: "
                f"{len(self.balance)})"
            )
        parts = _cut(module, self.balance)
        self._place([part.to(at) for part, at in zip(parts, places, strict=True)], places)

    def forward(self, input: Tensor | tuple[Tensor, ...]) -> Any:
        """The Sequential's output for a mini-batch. Raises TypeError for other than tensors."""
        check(input)
        if not self.devices:
            return input
        if isinstance(input, Tensor):
            return self._run([piece for (piece,) in scatter((input,), self.chunks)], _call)
        return self._run(scatter(input, self.chunks), _call)


def check(value: object) -> None:
    """Raise TypeError unless it is a tensor or a tuple of tensors."""
    for item in value if isinstance(value, tuple) else (value,):
        if not isinstance(item, Tensor):
            raise TypeError(f"expected Tensor, but got {type(item).__name__}")


def verify_module(module: nn.Sequential) -> None:
    """Raise TypeError for what is no Sequential, ValueError if children are or share the same."""
    partitioned.verify_module(module)
    of_children = sum(len(list(child.parameters())) for child in module)
    if len(list(module.parameters())) != of_children:
        raise ValueError("module with duplicate parameters in distinct children is not supported")


def _call(partition: nn.Module, value: Any) -> Any:
    output = partition(value)
    check(output)
    return output


def _cut(module: nn.Sequential, balance: Iterable[int]) -> Iterator[nn.Sequential]:
    layers = module.named_children()
    for n in balance:
        part = nn.Sequential()
        for name, layer in islice(layers, n):
            part.add_module(name, layer)
        yield part


def _advised(problem: str) -> str:
    return (
        f"{problem}. fxpipe.compat.balance, which was torchgpipe.balance, finds one: "
        "balance=balance_by_time(partitions, model, sample)"
    )
