"""What libraries hold of a GPU's memory for good, once a lane has computed with them.

cuBLAS has a workspace for each thread and stream that asked it for a matrix product, and keeps it
(torch's notes on CUDA semantics). A lane has one stream, on which forwards come from its own thread
and backwards from autograd's.
"""

import gc

import torch


def drop_workspaces(device: torch.device) -> int:
    """Let go of the libraries' workspaces; gives the bytes that they held of `device`.

    There are none on a CPU. While there is a CUDA graph they stay: it may write into one whenever
    it is replayed. Then 0 is given.
    """
    if device.type != "cuda" or _graphs_are_there():
        return 0
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)


def _graphs_are_there() -> bool:
    """Whether anything in this process can still replay a CUDA graph, captured by whomever."""
    gc.collect()
    return any(issubclass(type(one), torch.cuda.CUDAGraph) for one in gc.get_objects())
