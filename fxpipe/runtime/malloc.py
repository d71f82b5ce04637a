"""Memory that CPU lanes free stays with the process, for the next micro-batches."""

import torch

# Just under the largest block that glibc learns from, DEFAULT_MMAP_THRESHOLD_MAX: with its header
# and alignment it is no larger.
_BLOCK_BYTES = 32 * 2**20 - 8192


def keep_freed_memory() -> None:
    """Have glibc's malloc give memory back only when over 64 MiB of a thread's lie free at its end.

    That limit begins at 128 KiB and follows what is freed: it becomes twice the largest block that
    was mapped by itself (mallopt(3), M_MMAP_THRESHOLD). Under a low one, a step's tensors go back
    to the system and come again, and each of their pages faults when it is written. Where there is
    another malloc, nothing comes of it.
    """
    torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device="cpu")
