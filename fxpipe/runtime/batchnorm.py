"""Batch norm whose running statistics are those of the mini-batch, not of each micro-batch.

After torchgpipe's deferred batch norm. A micro-batch is normalized by its own statistics; they are
put together, and the running ones are updated once all micro-batches have come. Recomputation
counts nothing.
"""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fxpipe.runtime.recomputing import is_recomputing

Module = TypeVar("Module", bound=nn.Module)


class DeferredBatchNorm(_BatchNorm):
    """A batch norm that updates its running statistics once in `chunks` micro-batches.

    They become what `nn.BatchNorm` makes of the same rows in one batch, up to rounding: the
    unbiased variance too.
    """

    sum: Tensor
    sum_squares: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        # Of the mini-batch so far: the sum, and the sum of squared distances from the mean, which
        # other than that of squares loses nothing where the mean is large.
        self.register_buffer("sum", torch.zeros_like(self.running_mean))
        self.register_buffer("sum_squares", torch.zeros_like(self.running_var))
        self.counter = 0
        self.tracked = 0
        self.chunks = chunks

    def begin(self, chunks: int) -> None:
        """Expect a mini-batch of `chunks` micro-batches; one that was not finished is forgotten."""
        self.chunks = chunks
        self.counter = self.tracked = 0

    # torch.compile would take the counts, and whether it recomputes, for constants.
    @_disable_dynamo
    def forward(self, input: Tensor) -> Tensor:
        """The input normalized: by its own statistics in training, by the running ones else."""
        if not self.training:
            return self._normalized(input, self.running_mean, self.running_var, momentum=0.0)
        # With this momentum torch leaves the micro-batch's own statistics there.
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        output = self._normalized(input, mean, var, momentum=1.0)
        if not is_recomputing():
            self._track(mean, var, input.numel() // input.size(1))
        return output

    def _normalized(self, input: Tensor, mean: Tensor, var: Tensor, momentum: float) -> Tensor:
        return F.batch_norm(
            input, mean, var, self.weight, self.bias, self.training, momentum, self.eps
        )

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Add a micro-batch's mean and unbiased variance (Chan et al., 1979)."""
        if self.tracked == 0:
            self.sum = torch.zeros_like(self.running_mean)
            self.sum_squares = torch.zeros_like(self.running_var)
        else:
            apart = mean - self.sum / self.counter
            self.sum_squares += apart**2 * (self.counter * count / (self.counter + count))
        self.sum += mean * count
        self.sum_squares += var * (count - 1)
        self.counter += count
        self.tracked += 1
        if self.tracked == self.chunks:
            self._commit()

    def _commit(self) -> None:
        self.num_batches_tracked += 1
        mean, var = self.sum / self.counter, self.sum_squares / (self.counter - 1)
        # As a tensor, so that nothing waits for the device.
        factor = 1 / self.num_batches_tracked.to(mean.dtype)
        if self.momentum is not None:
            factor = torch.full_like(factor, self.momentum)
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(var, factor)
        self.sum.zero_()
        self.sum_squares.zero_()
        self.begin(self.chunks)

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module, chunks: int = 1) -> Module:
        """The module with all batch norms in it that keep running statistics made deferred.

        They share parameters and buffers with those they replace.
        """
        return _converted(module, chunks, {})  # type: ignore[return-value]


def deferred(modules: Iterable[nn.Module]) -> tuple[DeferredBatchNorm, ...]:
    """All deferred batch norms in the modules, each once."""
    found = (norm for module in modules for norm in module.modules())
    return tuple(dict.fromkeys(norm for norm in found if isinstance(norm, DeferredBatchNorm)))


def defer(module: nn.Module, written: Iterable[str], chunks: int) -> None:
    """Make all batch norms within the module deferred; `written` are the buffers it writes.

    Raises ValueError where it updates running statistics outside of a batch norm's own forward.
    """
    DeferredBatchNorm.convert_deferred_batch_norm(module, chunks)
    held = {path for path, child in module.named_modules() if isinstance(child, DeferredBatchNorm)}
    for name in written:
        path, _, leaf = name.rpartition(".")
        if leaf in ("running_mean", "running_var") and path not in held:
            raise ValueError(
                f"{name!r} is updated by code of the model's own, not by a batch norm of torch.nn, "
                "so it can't be deferred"
            )


def _converted(module: nn.Module, chunks: int, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in known:
        known[module] = _replaced(module, chunks)
        for name, child in module.named_children():
            known[module]._modules[name] = _converted(child, chunks, known)
    return known[module]


def _replaced(module: nn.Module, chunks: int) -> nn.Module:
    if not isinstance(module, _BatchNorm) or not module.track_running_stats:
        return module
    if isinstance(module, DeferredBatchNorm) and module.chunks == chunks:
        return module
    if type(module).forward not in _FORWARDS:
        raise ValueError(
            f"{type(module).__name__} has a forward of its own, which deferring its running "
            "statistics would replace: use a batch norm of torch.nn"
        )
    output = DeferredBatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, chunks
    )
    output.train(module.training)
    output._parameters |= module._parameters
    output._buffers |= module._buffers
    return output


_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, DeferredBatchNorm.forward)
