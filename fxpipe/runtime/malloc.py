"""Memory that CPU lanes free stays with the process, for the next micro-batches."""

import torch

# The largest block, its header included, that glibc learns from: DEFAULT_MMAP_THRESHOLD_MAX.
_LARGEST_BYTES = 32 * 2**20


def keep_freed_memory() -> None:
    """Have glibc's malloc give memory back only when over 64 MiB of a thread's lie free at its end.

    It begins with 128 KiB, and goes up to twice the largest block that it had mapped by itself and
    that was freed (mallopt(3), M_MMAP_THRESHOLD). Below that, a step's tensors go back and forth,
    and each page of them faults again when it is written. Where there is another malloc, nothing
    comes of it.
    """
    page_bytes = 4096
    torch.empty(_LARGEST_BYTES - 2 * page_bytes, dtype=torch.uint8, device="cpu")
