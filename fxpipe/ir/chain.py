"""The model in blocks that no cut divides."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that one block computes and later blocks read. `gradient`: one flows back.

    It may be a view of another, whose memory it is within a stage; what is sent on is its own.
    """

    name: str
    bytes: int
    producer: int
    consumers: tuple[int, ...]
    gradient: bool
    view_of: str | None = None

    @property
    def memory(self) -> str:
        """The name of its memory, as blocks name what they save."""
        return self.view_of or self.name


@dataclass(frozen=True, slots=True)
class Block:
    """Ops that must stay on one device, in order, with their cost.

    `saved` and `parameters` name storages, so that what two blocks share is counted once a stage;
    the backward makes gradients of the parameters `trained`.
    `weight_gradient_ms` is what of `backward_ms` is for weights alone. While the block runs,
    `forward_workspace_bytes`, then `backward_workspace_bytes`, are there on top of what blocks up
    to it save. A backward in two halves takes `halving_ms` longer, and `arriving_bytes` of
    gradients wait for the second half. On top of what all blocks save, and of what waits at this
    one and those behind it, there are `input_workspace_bytes`, then `weight_workspace_bytes`. To be
    computed again, a forward keeps copies of the buffers it writes, `written_bytes`. Of the
    forward's workspace are the values `waiting`, of earlier blocks, and of the backward's and its
    first half's the gradients of the values `returning`. The loss, which is taken as the last
    block's forward ends, but not as it is computed again, takes `loss_bytes`.
    """

    ops: tuple[str, ...]
    forward_ms: float
    backward_ms: float
    saved: tuple[tuple[str, int], ...] = ()
    parameters: tuple[tuple[str, int], ...] = ()
    buffers: tuple[tuple[str, int], ...] = ()
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    weight_gradient_ms: float = 0.0
    arriving_bytes: int = 0
    halving_ms: float = 0.0
    written_bytes: int = 0
    input_workspace_bytes: int = 0
    weight_workspace_bytes: int = 0
    waiting: frozenset[str] = frozenset()
    returning: frozenset[str] = frozenset()
    loss_bytes: int = 0
    trained: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks in execution order; a stage is a run of them.

    `cuttable[k]` says whether a stage may end after block k (the last block always may). Values
    are those read by another block than their producer's, or, as block `len(blocks)`, by the
    caller; model inputs (producer -1) go straight from the caller to each stage that reads them.
    `divides[k]` is the number of the model's modules that a cut after block k would divide; a bare
    chain has none. An action of a stage takes `action_ms` besides its blocks, and each device holds
    `library_bytes` besides.
    """

    blocks: tuple[Block, ...]
    values: tuple[Value, ...]
    cuttable: tuple[bool, ...]
    divides: tuple[int, ...] = ()
    action_ms: float = 0.0
    library_bytes: int = 0

    def crossing(self, k: int) -> tuple[Value, ...]:
        """The values that a cut after block k sends on."""
        blocks = range(k + 1, len(self.blocks))
        return tuple(
            v for v in self.values if 0 <= v.producer <= k and any(c in blocks for c in v.consumers)
        )
