"""The settings of torch that belong to a thread, taken to another one.

They are grad mode, autocast, and what is done with tensors that autograd saves.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast on one kind of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Ambient:
    """What the caller's thread has switched on, for the threads that work for it."""

    grad: bool
    inference: bool
    autocast: tuple[Autocast, ...]
    autocast_cache: bool
    hooks: _Hooks | None = field(default=None, compare=False)  # they change no number

    @property
    def counts_saved(self) -> bool:
        """Whether torch's checkpoint is around, which knows saved tensors by their order."""
        return self.hooks is not None and self.hooks[0].__module__ == checkpoint.__module__

    @property
    def autocast_text(self) -> str:
        """Under which autocast it is, in words."""
        each = [f"{one.device_type} to {one.dtype}" for one in self.autocast if one.enabled]
        return f"under autocast on {' and '.join(each)}" if each else "under no autocast"

    @classmethod
    def capture(cls) -> "Ambient":
        """The settings of this thread."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in kinds
            ),
            torch.is_autocast_cache_enabled(),
            _saved_tensors_hooks(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run a block under these settings."""
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            self.autocasting(self.autocast_cache),
            self._saving(),
        ):
            yield

    def _saving(self) -> AbstractContextManager[None]:
        if self.hooks in (None, _saved_tensors_hooks()):
            return nullcontext()
        return saved_tensors_hooks(*self.hooks)

    @contextmanager
    def autocasting(self, cache: bool) -> Iterator[None]:
        """Run a block under the autocast settings alone; `cache` keeps casts of parameters."""
        with ExitStack() as stack:
            for each in self.autocast:
                if each.enabled or torch.is_autocast_enabled(each.device_type):
                    stack.enter_context(
                        torch.autocast(each.device_type, each.dtype, each.enabled, cache)
                    )
            yield


def _saved_tensors_hooks() -> _Hooks | None:
    """The innermost ones of this thread, as `save_on_cpu` sets; private in torch 2.11 and 2.13."""
    found: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return found


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run a block as a backward runs where `loss.backward()` stands outside of autocast.

    Its ops compute in the dtypes of the forward's. Autocast would lower those of an op that the
    model has out of it (torch.amp: "Backward passes under autocast are not recommended").
    """
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
