"""What ops, the loss and links cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one op costs on one micro-batch.

    `saved` are the storages that its backward keeps: (value whose memory it is, bytes), parameters
    left out. `weight_gradient_ms` is what of `backward_ms` is for weights alone. `workspace_bytes`
    and `backward_bytes` are what forward and backward make, at their fullest; a step does not make
    `added_bytes` of the latter, which it adds to gradients that are there, and of an op of several
    layers a whole backward needs `freed_bytes` less, as it lets go of what the last ones saved. A
    backward in two halves takes `halving_ms` longer, and `arriving_bytes` of gradients wait for the
    second half. Of the parameters `shapes_of` no more than the shape is read: no gradient comes to
    them.
    """

    forward_ms: float
    backward_ms: float
    saved: tuple[tuple[str, int], ...] = ()
    workspace_bytes: int = 0
    weight_gradient_ms: float = 0.0
    backward_bytes: int = 0
    arriving_bytes: int = 0
    halving_ms: float = 0.0
    added_bytes: int = 0
    freed_bytes: int = 0
    shapes_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LossCost:
    """What a micro-batch's loss takes, up to its gradient, and what is there at its fullest.

    The outputs are among that for as long as they are needed, but for those that it leaves
    `unused`, though they have a gradient: none comes to them.
    """

    ms: float
    peak_bytes: int
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """Milliseconds that a GPU's host takes to launch: the forward and the backward of an op, in the
    mean, a micro-batch's loss, and what an action takes besides.

    For a share `serial` of that no other lane of the process gets on.
    """

    forward_ms: float
    backward_ms: float
    loss_ms: float = 0.0
    action_ms: float = 0.0
    serial: float = 1.0


@dataclass(frozen=True, slots=True)
class Link:
    """Time of one message between two devices: latency_ms + bytes / bytes_per_ms.

    Processors send by themselves: a value takes `value_ms`, and each byte of it `byte_ms`, from the
    work of the one that sends it, and as much from that of the one that receives it.
    """

    latency_ms: float
    bytes_per_ms: float
    value_ms: float = 0.0
    byte_ms: float = 0.0

    def transfer_ms(self, n_bytes: int) -> float:
        """Milliseconds that a message of `n_bytes` holds the link."""
        return self.latency_ms + n_bytes / self.bytes_per_ms

    def busy_ms(self, n_values: int, n_bytes: int) -> float:
        """Milliseconds that so many values, of `n_bytes` in all, take from the work of each end."""
        return n_values * self.value_ms + n_bytes * self.byte_ms


@dataclass(frozen=True, slots=True)
class Network:
    """The link of each ordered pair of devices: `link`, but for those in `pairs`."""

    link: Link
    pairs: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def between(self, source: int, target: int) -> Link:
        """The link that messages from device `source` to device `target` take."""
        return self.pairs.get((source, target), self.link)


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs by op, the links between devices, and how they were got.

    `capacity_bytes` is what one device holds, of which libraries take `library_bytes` for good.
    `batch` is the micro-batch's rows. An action takes `action_ms` besides its ops. `loss` is what
    the training loss costs, where it is known, and `launch` what the host does for a GPU. Of values
    whose shape depends on data, `unknown_bytes` are the most that a micro-batch had.
    """

    costs: Mapping[str, OpCost]
    network: Network
    device: str
    capacity_bytes: int
    batch: int
    fingerprint: str
    origin: str = "measured"
    action_ms: float = 0.0
    loss: LossCost | None = None
    launch: Launch | None = None
    library_bytes: int = 0
    unknown_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def on_processors(self) -> bool:
        """Whether the devices are processors."""
        return "cpu" in (self.device, self.origin.removeprefix("analytic:"))
