"""Parameters of which each replica holds a share, by FSDP2's `fully_shard`.

FSDP hooks into one forward of a module and into its backward. A stage has many, some in halves,
some run again: so what it hooks into is a module around the stages', which they run without, and
whose own forward and backward do nothing. A backward that has passed a module makes FSDP sum what
gradients its parameters have, and let go of them.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from fxpipe.runtime.distributed.dtensors import local, shared_like

_Place = tuple[nn.Module, str]


class Shard:
    """Parameters of one dtype that the same stages use: gathered and reduced together.

    Between, each is a DTensor in its place in the stages' modules.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
    ) -> None:
        """`modules` are those of the stages; the replicas along `mesh` hold equal `parameters`.

        `group` is of the same replicas: the mesh's own may carry nothing that is on the CPU.
        """
        self._group = group
        places = {parameter: _places(modules, parameter) for parameter in parameters}
        self._places = [found[0] for found in places.values()]
        self._wholes = [_Whole(p, places[p], mesh) for p in parameters if not p.dim()]
        self._around = _Around(modules)
        cut = {parameter for parameter in parameters if parameter.dim()}
        for parameter in cut:
            parameter.data = parameter.data.contiguous()  # FSDP takes no others
        others = set(self._around.parameters()) - cut
        self._fsdp: FSDPModule = fully_shard(
            self._around, mesh=mesh, reshard_after_forward=False, ignored_params=others
        )
        # A plain sum: losses are weighted already.
        self._fsdp.set_gradient_divide_factor(1.0)
        self._fsdp.set_force_sum_reduction_for_comms(True)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """As they are now: shares, or leaves that were gathered."""
        return [_at(place) for place in self._places]

    def gather(self) -> None:
        """Put leaves with all values into the modules; all replicas do it together."""
        self._fsdp.unshard()
        for whole in self._wholes:
            whole.gather()

    def free(self) -> None:
        """Let go of the leaves."""
        self._fsdp.reshard()
        for whole in self._wholes:
            whole.free()

    def reduce(self) -> None:
        """Give each share its part of the sum of the leaves' gradients, and let go of those.

        All replicas do it together. What has no gradient on any of them gets none.
        """
        there = torch.tensor([leaf.grad is not None for leaf in self.parameters]).to(torch.uint8)
        dist.all_reduce(there, dist.ReduceOp.MAX, self._group)
        for leaf, found in zip(self.parameters, there.tolist(), strict=True):
            if found and leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
        for whole in self._wholes:
            whole.reduce(self._group)
        self._around(torch.ones((), requires_grad=True)).backward()

    def renew(self) -> None:
        """Take over what stands in the modules now, as after `load_state_dict(assign=True)`."""
        self._around.load_state_dict({}, strict=False)
        for whole in self._wholes:
            whole.renew()


class _Around(nn.Module):
    """What FSDP hooks into."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)

    def forward(self, nothing: Tensor) -> Tensor:
        """No view, of which FSDP would warn."""
        return nothing.clone()


class _Whole:
    """A parameter without dimensions, which can't be cut: each replica holds it.

    It is a DTensor too: a GradScaler takes no others beside some.
    """

    def __init__(self, parameter: nn.Parameter, places: Sequence[_Place], mesh: DeviceMesh) -> None:
        self._places = places
        whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
        self._put(nn.Parameter(whole, parameter.requires_grad))
        self.renew()

    def renew(self) -> None:
        """Take over what stands in the modules now, with a leaf that shares its memory.

        It stays the same, as FSDP's do: graphs end in it.
        """
        self._parameter = _at(self._places[0])
        self._leaf = nn.Parameter(local(self._parameter.detach()), requires_grad=False)

    def gather(self) -> None:
        """Put the leaf into the modules."""
        self._leaf.requires_grad_(self._parameter.requires_grad)
        self._put(self._leaf)

    def free(self) -> None:
        """Put the parameter back."""
        self._put(self._parameter)

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Sum the leaf's gradient, if it has one, and put the parameter back."""
        gradient, self._leaf.grad = self._leaf.grad, None
        self.free()
        if gradient is not None:
            dist.all_reduce(gradient, group=group)
            self._parameter.grad = shared_like(self._parameter, gradient)

    def _put(self, parameter: nn.Parameter) -> None:
        for holder, leaf in self._places:
            holder._parameters[leaf] = parameter


def _places(modules: Sequence[nn.Module], parameter: nn.Parameter) -> list[_Place]:
    return [
        (holder, leaf)
        for module in modules
        for holder in module.modules()
        for leaf, found in holder._parameters.items()
        if found is parameter
    ]


def _at(place: _Place) -> nn.Parameter:
    holder, leaf = place
    parameter = holder._parameters[leaf]
    assert parameter is not None
    return parameter
