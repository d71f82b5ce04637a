"""Which kernels torch's attention may take: one setting for all threads.

`torch.nn.attention.sdpa_kernel` puts back what it found. Of two threads that are in such blocks at
once, the one that ends last puts back what the other had set.
"""

from collections.abc import Sequence

from torch.nn import attention
from torch.nn.attention import SDPBackend


def kernels_in_order() -> tuple[str, ...]:
    """Names of those that it may take now, the preferred first.

    `_cur_sdpa_kernel_backends` is private to torch: tests/test_private.py.
    """
    return tuple(one.name for one in attention._cur_sdpa_kernel_backends(with_priority=True))


def backends(names: Sequence[str]) -> list[SDPBackend]:
    """Those of these names, as `sdpa_kernel` takes them."""
    return [getattr(SDPBackend, name) for name in names]


def let_take(names: tuple[str, ...]) -> None:
    """Let it take these, in this order.

    `_sdpa_kernel` is private to torch: tests/test_private.py.
    """
    if names != kernels_in_order():
        attention._sdpa_kernel(backends(names), set_priority=True)
