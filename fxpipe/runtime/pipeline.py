"""The package at work: an `nn.Module` with the original's state, and a training step."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from fxpipe.runtime import microbatch, ties
from fxpipe.runtime.ambient import without_autocast
from fxpipe.runtime.clock import Clock
from fxpipe.runtime.closure import running
from fxpipe.runtime.end import LossFn
from fxpipe.runtime.engine import Engine
from fxpipe.runtime.graph import Graphs
from fxpipe.runtime.memory import Memory
from fxpipe.runtime.recorder import Trace
from fxpipe.runtime.structure import rebuild
from fxpipe.runtime.weights.saving import Alone, save


class Pipeline(Engine):
    """A compiled model: call it like the original, or train it with `step`.

    A batch is cut into `manifest.microbatches` micro-batches along dimension 0. Outputs are on the
    last stage's device.
    """

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The original model's output for a batch; one of fewer than m rows goes one by one.

        Each output is put together from the micro-batches': concatenated along its batch
        dimension; without one, floats are averaged, weighted by rows, as is right for a mean loss,
        and of others the last micro-batch's is given. In a closure of a `Runner`, what is given is
        one of the runner's micro-batches, and goes through whole. Raises InputError, StageError, or
        WeightsError, where what was put into the pipeline can't be computed with.
        """
        closure = running()
        if closure is not None:
            output, streams = closure.ask(self._visit(args, kwargs))
            closure.use_streams(streams)
            return output
        microbatch.refuse_unmergeable(self._manifest, self.training)
        inputs = self._inputs(args, kwargs)
        with self._turn:
            rows, call = self._begin(inputs)
            with ties.copied(self._state.ties, self._state.parameters(self)) as copies:
                clock = Clock(call, copies, self._components.dependency)
                lanes = range(len(self._devices))
                self._run([partial(clock.run_lane, lane) for lane in lanes], call)
        return rebuild(self._structure(), self._merged(call, inputs, rows))

    def step(
        self,
        *args: object,
        target: Any = None,
        loss_fn: LossFn,
        scaler: GradScaler | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Forward and backward of one training step, by the schedule table.

        Each micro-batch's loss is `loss_fn(output, its piece of target)`: a mean over its rows, as
        one number. It is weighted by its share of the rows, so that gradients, added to `.grad`,
        are those of the mean over the batch. Tensors in `target` (nested in tuples, lists and
        dicts) with as many rows as the batch are cut, others given whole; target and loss are on
        the last stage's device. Inputs that require grad get theirs. With a `scaler`, gradients are
        scaled by it, as those of `scaler.scale(loss)` are; what is returned is not.

        Returns the batch's loss, without a graph. Raises what `forward` does; after an InputError
        or a StageError the gradients may hold a part of the step's.
        """
        self._refuse_step()
        inputs = self._inputs(args, kwargs)
        eager = partial(self._step, self._run_table)
        with self._turn:
            if self._captures and self._trace is None:
                self._follow()
                self._graphs = self._graphs or Graphs(self._devices, self._stages)
                eager = partial(self._graphs.step, partial(self._step, self._run_in_order), eager)
            loss, gradients = eager(inputs, target, loss_fn, scaler)
        with without_autocast():
            for tensor, gradient in zip(inputs, gradients, strict=True):
                if gradient is not None:
                    torch.autograd.backward([tensor], [gradient])
        return loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, around: Iterable[Tensor] = ()
    ) -> Tensor:
        """Scale all gradients down so that their norm over all stages is at most `max_norm`.

        Returns the norm that they had. A parameter that several stages use counts once. `around`
        are further parameters to count and scale, of what stands around the pipeline in a program.
        """
        every = dict.fromkeys([*self.parameters(), *around])
        return nn.utils.clip_grad_norm_(every, max_norm, norm_type)

    def save_weights(self, path: str | Path, max_shard_size: int | str = "5GB") -> None:
        """Write safetensors that `load_weights`, or `from_pretrained` of transformers, reads.

        `path` is a file whose name ends in .safetensors, or a folder: it gets `model.safetensors`,
        or shards of at most `max_shard_size` with `model.safetensors.index.json`; what else is
        there stays. Keys are the original model's, of a tied parameter the first of its names. What
        stood there before goes once all is written. Raises InputError, and WeightsError if that is
        not to be.
        """
        save(Path(path), self._owned(), max_shard_size, Alone())

    def trace(self, path: str | Path) -> AbstractContextManager[None]:
        """Write the last step of a `with` block to `path`, the predicted step beside it.

            with pipe.trace("step.json"):
                pipe.step(x, target=y, loss_fn=loss_fn)

        The file is for ui.perfetto.dev or chrome://tracing: a row per device, with F, B, I, W and
        recomputation in it, and copies below; on CUDA the times are those of the device. What is
        predicted is the schedule that the package was compiled with. Raises InputError if no step
        ran.
        """

        def use(found: Trace | None) -> None:
            self._trace = found

        return Trace(path, self._devices, self._manifest.estimate, use, self._first_lane)

    def memory(self) -> Memory:
        """The peak bytes of each device over a step: predicted, and measured in a `with` block.

            with pipe.memory() as memory:
                pipe.step(x, target=y, loss_fn=loss_fn)
            print(memory)

        CUDA devices' are those of torch's allocator, of which the lanes of one GPU have one; of a
        CPU lane it is the tensors that its ops made, with its parameters, gradients and buffers;
        meanwhile lanes copy what they get from the caller and from each other, as devices do, and
        stages that torch.compile runs are run op by op: what is measured is what they hold without
        it. Counting takes time: trace another step.
        """

        def count(memory: Memory | None) -> None:
            self._memory = memory

        return Memory(self._devices, self._estimate, self._stages, count, self._first_lane)

    def __repr__(self) -> str:
        lines = [
            f"{self._manifest.model} in {len(self._stages)} stages, "
            f"{self._manifest.microbatches} micro-batches, {self._manifest.schedule}:",
            *(
                f"  stage {s.index} on {self._devices[s.lane]}: {s.spec.ops} ops"
                for s in self._stages
            ),
        ]
        return "\n".join(lines)

    def _owned(self) -> dict[str, Tensor]:
        """What a checkpoint has of this process: each tensor once."""
        tensors = self._tensors()
        return {name: tensors[name] for name in self._state.first_names if name in tensors}
