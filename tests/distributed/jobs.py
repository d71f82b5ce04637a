"""What ranks are asked to do: each compares its part with the plain model in its own process."""

import copy
import gc
import json
import os
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import toys
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from fxpipe import checkpoint
from fxpipe.errors import InputError, StageError, WeightsError
from fxpipe.runtime import Runner, load, stream
from fxpipe.runtime.distributed import dtensors, ranks, replicas
from fxpipe.runtime.distributed.pipeline import DistributedPipeline
from fxpipe.runtime.random import microbatch_seeds
from fxpipe.runtime.weights import saving


def pair(folder: Path, toy: toys.Toy, **settings: object) -> tuple[nn.Module, DistributedPipeline]:
    """The plain model, and this rank's part of its pipeline with the same weights."""
    pipe = load(folder, distributed=True, **settings)  # type: ignore[arg-type]
    assert isinstance(pipe, DistributedPipeline)
    torch.manual_seed(2)
    model = toy.model().double()
    pipe.load_state_dict(model.state_dict())
    return model, pipe


def own(pipe: DistributedPipeline, inputs: Sequence[Tensor], everywhere: bool) -> Sequence[Tensor]:
    """The inputs where they are needed, or everywhere."""
    reads = [
        wire
        for wire, stages in pipe._wires[pipe.training].readers.items()
        if wire.source == -1 and stages
    ]
    return inputs if everywhere or reads else ()


def soon(holds: Callable[[], bool]) -> bool:
    """Whether it holds within a few seconds."""
    until = time.monotonic() + 5
    while not holds() and time.monotonic() < until:
        time.sleep(0.001)
    return holds()


def steps(
    folder: Path, name: str, m: int, batches: Sequence[int], everywhere: bool, **settings: object
) -> str:
    """Steps of several batch sizes, whose gradients add up; then an evaluation."""
    toy = toys.TOYS[name]
    model, pipe = pair(folder, toy, **settings)
    random = name == "noisy"
    for batch in batches:
        inputs = toy.inputs(batch)
        torch.manual_seed(3)
        expected = toys.plain_step(toy, model, inputs, min(m, batch), random)
        torch.manual_seed(3)
        found = pipe.step(*own(pipe, inputs, everywhere), loss_fn=toys.mean_loss)
        assert toys.same(found, expected), (batch, found, expected)
        toys.assert_same_state(pipe, model)
    model.eval()
    pipe.eval()
    inputs = toy.inputs(batches[0])
    with torch.no_grad():
        torch.manual_seed(3)
        pieces = toys.microbatched_outputs(toy, model, inputs, min(m, batches[0]), random)
        torch.manual_seed(3)
        output = pipe(*own(pipe, inputs, everywhere))
    if not pipe.is_last:
        assert output is None
        return "equal"
    parts = [toys.describe(piece)[1] for piece in pieces]
    for k, tensor in enumerate(toys.describe(output)[1]):
        if tensor.dim() > 1:
            assert toys.same(tensor, torch.cat([part[k] for part in parts]))
    return "equal"


def compiled_steps(folder: Path, name: str, m: int, batches: Sequence[int]) -> str:
    """Steps of stages through torch.compile, without Inductor's kernels."""
    compiled = nn.Module.compile

    def traced(module: nn.Module, options: object) -> None:
        compiled(module, backend="aot_eager")

    with mock.patch.object(nn.Module, "compile", traced):
        return steps(folder, name, m, batches, False, compile=True)


def replicated(
    folder: Path, name: str, m: int, batches: Sequence[Sequence[int]], fully_shard: bool = False
) -> str:
    """Steps of replicas, each with its own number of rows, whose gradients add up over steps."""
    toy = toys.TOYS[name]
    dp = len(batches[0])
    model, pipe = pair(folder, toy, dp=dp, fully_shard=fully_shard)
    plain = [copy.deepcopy(model) for _ in range(dp)]
    random = name == "noisy"
    for rows in batches:
        first, *unbatched = toy.inputs(sum(rows))
        prompts, mine = ([t.clone().requires_grad_() for t in unbatched] for _ in range(2))
        pieces = [(piece, *prompts) for piece in first.split(list(rows))]
        shares = [n / sum(rows) for n in rows]
        expected, drawn = torch.zeros((), dtype=torch.float64), 0
        for share, each, piece, n in zip(shares, plain, pieces, rows, strict=True):
            torch.manual_seed(3)
            microbatch_seeds(drawn)  # those of the replicas before
            drawn += min(m, n)
            expected += share * toys.plain_step(toy, each, piece, min(m, n), random, share)
        torch.manual_seed(3)
        inputs = own(pipe, (pieces[pipe._ranks.replica][0], *mine), False)
        found = pipe.step(*inputs, loss_fn=toys.mean_loss)
        assert toys.same(found, expected), (rows, found, expected)
        for prompt, its in zip(inputs[1:], prompts, strict=False):
            assert toys.same(prompt.grad, its.grad)
    for parameters in zip(*(each.parameters() for each in plain), strict=True):
        if parameters[0].grad is not None:
            parameters[0].grad = torch.stack([p.grad for p in parameters]).sum(0)
    toys.assert_same_state(pipe, plain[0])
    return "equal"


def gradients_go_on(folder: Path, dp: int) -> int:
    """How many hooked steps' gradients are equal: a replica has a hook, the others new tensors.

    Between steps gradients are halved; the memory in which a step finds them is that of their sum.
    """
    toy, m = toys.TIED, 2
    model, pipe = pair(folder, toy, dp=dp)
    inputs, replica = toy.inputs(m * dp), pipe._ranks.replica
    own = [x.chunk(dp)[replica] for x in inputs]
    parameters = [*pipe.parameters()]
    seen: list[list[Tensor]] = []
    for k in range(4):
        seen.append([])
        memory = [p.grad.data_ptr() for p in parameters if p.grad is not None]
        toys.plain_step(toy, model, inputs, m)
        pipe.step(*own, loss_fn=toys.mean_loss)
        toys.assert_same_state(pipe, model)
        assert k == 0 or memory == [p.grad.data_ptr() for p in parameters if p.grad is not None]
        for p in (*model.parameters(), *parameters):
            p.grad = p.grad / 2 if replica else p.grad.mul_(0.5)
        if k == 0 and replica == 0:
            parameters[-1].register_post_accumulate_grad_hook(
                lambda p: seen[-1].append(p.grad.clone())
            )
    found = [some[-1] for some in seen if some]
    assert all(toys.same(each, found[0]) for each in found)
    return len(found)


def in_data_parallel(folder: Path) -> str:
    """A pipeline of one process in torch's DistributedDataParallel, as Pipe's users have it."""
    toy, rank = toys.NORMED, torch.distributed.get_rank()
    torch.manual_seed(2)
    model, pipe = toy.model().double(), load(folder)
    pipe.load_state_dict(model.state_dict())
    plain = [copy.deepcopy(model) for _ in range(2)]
    spread = nn.parallel.DistributedDataParallel(pipe)
    pieces = toy.inputs(16)[0].split(8)
    for _ in range(2):
        toys.mean_loss(spread(pieces[rank])).backward()
        for each, piece in zip(plain, pieces, strict=True):
            toys.plain_step(toy, each, (piece,), 4, share=0.5)
    for ours, *theirs in zip(pipe.parameters(), *(p.parameters() for p in plain), strict=True):
        assert toys.same(ours.grad, theirs[0].grad + theirs[1].grad)
    return "equal"


def replicas_start_equal(folder: Path) -> list[Tensor]:
    """What a rank's parameters are after loading, where each process draws others."""
    torch.manual_seed(torch.distributed.get_rank())
    pipe = load(folder, distributed=True, dp=2)
    return [parameter.detach() for parameter in pipe.parameters()]


def loss_that_trains(folder: Path) -> str:
    """The error of replicas whose loss has a parameter; without a gradient it has none."""
    _, pipe = pair(folder, toys.CHAIN, dp=2)
    factor = torch.ones(3, dtype=torch.float64)

    def loss_fn(output: Any, target: Any) -> Tensor:
        return toys.mean_loss(output) * factor.mean()

    pipe.step(*toys.CHAIN.inputs(), loss_fn=loss_fn)
    factor.requires_grad_()
    try:
        pipe.step(*toys.CHAIN.inputs(), loss_fn=loss_fn)
    except StageError as error:
        return str(error)
    return "no error"


def replicated_training(folder: Path, path: Path, fully_shard: bool = False) -> str:
    """Replicas that clip, scale and save; what the plain model has after as many steps."""
    toy = toys.TIED
    model, pipe = pair(folder, toy, dp=2, fully_shard=fully_shard)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.05) for each in (model, pipe)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for rows in ((5, 3), (4, 6)):
        (x,) = toy.inputs(sum(rows))
        expected = toys.plain_step(toy, model, (x,), sum(rows))
        piece = x.split(list(rows))[pipe._ranks.replica]
        assert toys.same(pipe.step(piece, loss_fn=toys.mean_loss, scaler=scaler), expected)
        scaler.unscale_(optimizers[1])
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert toys.same(pipe.clip_grad_norm_(0.1), norm.double())
        optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    values = dict(model.named_parameters())
    assert all(toys.same(p, values[name]) for name, p in pipe.named_parameters())
    checkpoint.save(path, pipe, optimizers[1], pipe._ranks.replica)
    return "equal"


def replicated_resumed(folder: Path, path: Path, fully_shard: bool) -> str:
    """What such a checkpoint has, loaded by replicas: weights and optimizer state go on alike."""
    toy = toys.TIED
    model, pipe = pair(folder, toy, dp=2, fully_shard=fully_shard)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.05) for each in (model, pipe)]
    for rows in ((5, 3), (4, 6), (2, 4)):
        (x,) = toy.inputs(sum(rows))
        expected = toys.plain_step(toy, model, (x,), sum(rows))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if rows == (2, 4):
            assert checkpoint.load(path, pipe, optimizers[1]) == 0
            piece = x.split(list(rows))[pipe._ranks.replica]
            assert toys.same(pipe.step(piece, loss_fn=toys.mean_loss), expected)
            pipe.clip_grad_norm_(0.1)
            optimizers[1].step()
        optimizers[0].step()
        optimizers[0].zero_grad()
    values = dict(model.named_parameters())
    assert all(toys.same(p, values[name]) for name, p in pipe.named_parameters())
    return "equal"


def shares(folder: Path, path: Path) -> tuple[dict[str, int], str]:
    """How much a rank holds of each parameter, and the error of what can't be done any more.

    Before, all that touches parameters goes as it does with the plain model.
    """
    toy = toys.SCALED
    with mock.patch.object(replicas, "BUCKET_BYTES", 400):  # several a stage
        model, pipe = pair(folder, toy, dp=2, fully_shard=True)
    pipe.float().double()
    pipe.load_state_dict(model.state_dict())
    pieces = toy.inputs(10)[0].split([6, 4])
    x, other = pieces[pipe._ranks.replica], copy.deepcopy(model)

    def step() -> None:
        for each, piece in ((model, pieces[0]), (other, pieces[1])):
            toys.plain_step(toy, each, (piece,), 2, share=len(piece) / 10)
        for parameter, its in zip(model.parameters(), other.parameters(), strict=True):
            if its.grad is not None:
                parameter.grad += its.grad
        other.zero_grad()
        pipe.step(x, loss_fn=toys.mean_loss)
        toys.assert_same_state(pipe, model)

    def evaluate() -> None:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                output, expected = pipe.eval()(x), model.eval()(x)
            assert output is None or toys.same(output, expected)
        pipe.train()
        model.train()

    evaluate()
    step()
    step()
    plain, optimizer, again = (torch.optim.AdamW(m.parameters(), 0.05) for m in (model, pipe, pipe))
    for each in (plain, optimizer):
        each.step()
    checkpoint.save(path.parent / "last", pipe, optimizer)
    checkpoint.load(path.parent / "last", pipe, again)
    counts = [state["step"] for state in again.state.values()]
    assert counts
    assert not any(isinstance(count, DTensor) for count in counts)
    for each in (plain, again):
        each.step()
        each.zero_grad()
    evaluate()
    wholes: list[StorageWeakRef] = []

    def whole(tensor: Tensor) -> Tensor:
        # Gloo's own thread may hold what it has gathered a moment longer.
        assert soon(lambda: all(ref.expired() for ref in wholes)), "two at once"
        found = dtensors.whole(tensor)
        if dtensors.is_cut(tensor):
            wholes.append(StorageWeakRef(found.untyped_storage()))
        return found

    with mock.patch.object(ranks, "whole", whole):
        pipe.save_weights(path)
    assert len(wholes) == sum(map(dtensors.is_cut, pipe.parameters()))
    twice = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    for assign in (False, True):
        pipe.load_state_dict(twice, assign=assign)
        assert pipe._ranks.rank or not torch.equal(pipe.a.weight.full_tensor(), model.a.weight)
        pipe.load_weights(path)
        evaluate()
    other.load_state_dict(model.state_dict())
    step()
    pipe.load_state_dict(pipe.state_dict())
    evaluate()
    try:
        pipe.float()
    except InputError as error:
        return {name: p.to_local().numel() for name, p in pipe.named_parameters()}, str(error)
    raise AssertionError("dtypes changed")


def hooks_on_shares(folder: Path) -> tuple[dict[str, str], dict[str, list[int]]]:
    """The errors of steps in which one replica's tied weight has a hook; a right one follows each.

    Then how often hooks of the others ran in two steps.
    """
    _, pipe = pair(folder, toys.TIED, dp=2, fully_shard=True)
    inputs = toys.TIED.inputs()
    runner = Runner(3, around=())
    tied, *others = pipe.named_parameters()

    def step() -> None:
        pipe.step(*inputs, loss_fn=toys.mean_loss)

    def closures() -> None:
        runner.step(lambda x: (pipe(x).mean() * runner.share).backward(), *inputs)

    errors = {}
    for register in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
        for run in (step, closures):
            hook = register(tied[1], lambda _: None) if pipe._ranks.replica else None
            try:
                run()
            except InputError as error:
                errors[f"{register.__name__}, {run.__name__}"] = str(error)
            if hook is not None:
                hook.remove()
            run()
    ran: dict[str, list[int]] = {name: [] for name, _ in others}
    for name, parameter in others:
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ran[name].append(1))
    step()
    step()
    return errors, ran


def training(folder: Path, name: str, m: int) -> str:
    """Steps with an optimizer on each rank and gradients clipped by the norm over all of them."""
    toy = toys.TOYS[name]
    model, pipe = pair(folder, toy)
    trained = [list(each.parameters()) for each in (model, pipe)]
    optimizers = [torch.optim.AdamW(parameters, 0.05) for parameters in trained if parameters]
    inputs = toy.inputs()
    for _ in range(3):
        expected = toys.plain_step(toy, model, inputs, m)
        assert toys.same(pipe.step(*inputs, loss_fn=toys.mean_loss), expected)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert toys.same(pipe.clip_grad_norm_(0.1), norm.double())
        toys.assert_same_state(pipe, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    values = dict(model.named_parameters())
    assert all(toys.same(p, values[name]) for name, p in pipe.named_parameters())
    return "equal"


def shared_by_two_stages(folder: Path) -> str:
    """This rank's stages compute with one leaf of a weight that another's has too."""
    model, pipe = pair(folder, toys.SHARES)
    x, seen = toys.SHARES.inputs(), []

    def loss_fn(output: Tensor, target: object) -> Tensor:
        b, last = (stage.module for stage in pipe._stages)
        seen.append(b.b.weight is last.c.weight is last.d.weight)
        return toys.mean_loss(output)

    for _ in range(2):
        expected = toys.plain_step(toys.SHARES, model, x, 4)
        assert toys.same(pipe.step(*x, loss_fn=loss_fn), expected)
        toys.assert_same_state(pipe, model)
    assert all(seen)
    return "equal"


def hook_on_a_tie(folder: Path) -> str:
    """Rank 0 alone looks at the gradients of a weight that others have too, which add up."""
    model, pipe = pair(folder, toys.SHARES)
    x, seen = toys.SHARES.inputs(), []
    if pipe._ranks.rank == 0:
        pipe.get_parameter("a.weight").register_hook(lambda gradient: seen.append(gradient.clone()))
    for _ in range(3):
        toys.plain_step(toys.SHARES, model, x, 4)
        pipe.step(*x, loss_fn=toys.mean_loss)
        toys.assert_same_state(pipe, model)
    assert all(toys.same(gradient, seen[0]) for gradient in seen)
    return f"equal, seen {len(seen)} times"


def averaged(folder: Path) -> str:
    """A second pipeline follows the weights of the first, which can't be copied, and evaluates."""
    model, pipe = pair(folder, toys.CHAIN)
    _, average = pair(folder, toys.CHAIN)
    expected, inputs = copy.deepcopy(model), toys.CHAIN.inputs()
    refused = ""
    for make in (copy.deepcopy, pickle.dumps):
        try:
            make(pipe)
        except InputError as error:
            refused += str(error)
    assert "load the package a second time" in refused
    assert "can't be pickled" in refused
    for _ in range(2):
        toys.plain_step(toys.CHAIN, model, inputs, 4)
        pipe.step(*inputs, loss_fn=toys.mean_loss)
        with torch.no_grad():
            for each, mean in ((model, expected), (pipe, average)):
                parameters, means = list(each.parameters()), list(mean.parameters())
                torch._foreach_sub_(parameters, [p.grad for p in parameters])
                torch._foreach_lerp_(means, parameters, 0.3)
    with torch.no_grad():
        found = average(*inputs)
        assert found is None or toys.same(found, expected(*inputs))
    return "equal"


def scaled(folder: Path, frozen: Sequence[int]) -> list[tuple[float, bool]]:
    """The scale, and whether weights changed, after steps of which the first overflows on rank 1.

    Rank 0's own gradients are finite in both; ranks that are `frozen` have none.
    """
    _, pipe = pair(folder, toys.CHAIN)
    pipe.requires_grad_(pipe._ranks.rank not in frozen)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    weight = next(pipe.parameters())
    hook = weight.register_hook(lambda g: g * torch.inf) if pipe._ranks.rank else None
    found = []
    for _ in range(2):
        before = weight.detach().clone()
        pipe.step(*toys.CHAIN.inputs(), loss_fn=toys.mean_loss, scaler=scaler)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if hook is not None:
            hook.remove()
        found.append((scaler.get_scale(), not torch.equal(weight, before)))
    return found


def scaled_by_kind(folder: Path) -> list[bool]:
    """Whether weights and biases, of an optimizer each, changed: one of rank 1's overflowed."""
    _, pipe = pair(folder, toys.CHAIN)
    kinds = [[p for name, p in pipe.named_parameters() if kind in name] for kind in ("we", "bi")]
    optimizers = [torch.optim.SGD(parameters, 0.1) for parameters in kinds]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    if pipe._ranks.rank:
        kinds[0][0].register_hook(lambda g: g * torch.inf)
    before = [parameters[0].detach().clone() for parameters in kinds]
    pipe.step(*toys.CHAIN.inputs(), loss_fn=toys.mean_loss, scaler=scaler)
    for optimizer in optimizers:
        scaler.step(optimizer)
    return [not torch.equal(p[0], old) for p, old in zip(kinds, before, strict=True)]


def sparse(folder: Path, targets: Tensor) -> str:
    """A step with sparse gradients and a scaler, beside one process; the gradients are the same."""
    pipes = load(folder), load(folder, distributed=True)
    losses = []
    for pipe in pipes:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        loss_fn = functional.cross_entropy
        losses.append(pipe.step(targets, target=targets, loss_fn=loss_fn, scaler=scaler))
    assert toys.same(losses[0], losses[1])
    expected = dict(pipes[0].named_parameters())
    assert all(
        toys.same(p.grad.to_dense(), expected[name].grad.to_dense())
        for name, p in pipes[1].named_parameters()
    )
    return "equal"


def same_losses(folder: Path, batches: Sequence[Tensor]) -> list[bool]:
    """Whether each step's loss is that of one process, random numbers included."""
    one, pipe = load(folder), load(folder, distributed=True)
    found = []
    for x in batches:
        losses = []
        for each in (one, pipe):
            torch.manual_seed(7)
            losses.append(each.step(x, loss_fn=toys.mean_loss))
        found.append(toys.same(losses[0], losses[1]))
    return found


def input_gradients(folder: Path, name: str, m: int) -> str:
    """An input that requires grad gets its gradient on each rank that was given it."""
    toy = toys.TOYS[name]
    model, pipe = pair(folder, toy)
    ours, theirs = (
        [x.requires_grad_(x.is_floating_point()) for x in toy.inputs()] for _ in range(2)
    )
    with torch.no_grad():
        for mine, other in zip(ours, theirs, strict=True):
            mine.copy_(other)
    toys.plain_step(toy, model, tuple(theirs), m)
    pipe.step(*ours, loss_fn=toys.mean_loss)
    assert all(toys.same(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
    return "equal"


def dtypes(folder: Path) -> str:
    """Autocast, another dtype, and frozen parameters change what ranks send each other."""
    toy = toys.SKIPS
    _, pipe = pair(folder, toy)
    model = toy.model().double()
    model.load_state_dict(everything(pipe))
    (x,) = toy.inputs()
    for each in (pipe, model):
        each.float()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            found = pipe.step(x.float(), loss_fn=toys.mean_loss)
            pieces = [model(piece) for piece in x.float().split([4, 3, 3])]
            losses = [toys.mean_loss(p) * (len(p) / 10) for p in pieces]
        assert torch.allclose(found.double(), sum(losses).detach().double(), rtol=1e-5)
    for each in (pipe, model):
        each.double()
        each.zero_grad()
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(name.partition(".")[0] not in ("a", "b"))
    expected = toys.plain_step(toy, model, (x,), 3)
    assert toys.same(pipe.step(x, loss_fn=toys.mean_loss), expected)
    toys.assert_same_state(pipe, model)
    return "equal"


def everything(pipe: DistributedPipeline) -> dict[str, Tensor]:
    """The state of all ranks."""
    parts = pipe._ranks.gather(pipe.state_dict())
    return {name: tensor for part in parts for name, tensor in part.items()}


def other_losses(folder: Path) -> str:
    """A loss of other outputs gives others a gradient: what gets none stays without."""
    toy = toys.EARLY
    model, pipe = pair(folder, toy)
    inputs = toy.inputs()

    def logits(output: dict[str, Tensor], _: object) -> Tensor:
        return output["logits"].pow(2).sum(1).mean()

    def aux(output: dict[str, Tensor], _: object) -> Tensor:
        return output["aux"].pow(2).sum(1).mean()

    def both(output: dict[str, Tensor], target: object, weights: Sequence[float]) -> Tensor:
        losses = zip((logits, aux), weights, strict=True)
        parts = [weight * loss_fn(output, target) for loss_fn, weight in losses if weight]
        return torch.stack(parts).sum()

    changing = [partial(both, weights=weights) for weights in ((0, 1), (1, 2), (1, 0), (0, 3))]
    for loss_fn in (logits, aux, logits, aux, *changing):
        pipe.zero_grad()
        model.zero_grad()
        expected = loss_fn(model(*inputs), None)
        expected.backward()
        assert toys.same(pipe.step(*inputs, loss_fn=loss_fn), expected)
        toys.assert_same_state(pipe, model)
    return "equal"


def looked_at(folder: Path, out: Path) -> tuple[list[tuple[int, ...]], int]:
    """Of which lanes a rank's memory tells, and how many devices it has."""
    _, pipe = pair(folder, toys.CHAIN)
    x = toys.CHAIN.inputs()
    path = out / f"{pipe._ranks.rank}.json"
    with pipe.trace(path), pipe.memory() as memory:
        pipe.step(*x, loss_fn=toys.mean_loss)
    assert path.read_text()
    assert memory.peaks[0].measured_bytes
    return [peak.lanes for peak in memory.peaks], len(pipe.devices)


def traced(folder: Path, x: Tensor) -> None:
    """Writes a trace of each of two steps; the second is followed by an evaluation."""
    pipe = load(folder, distributed=True)
    for step in range(2):
        with pipe.trace(folder / f"{step} of {torch.distributed.get_rank()}.json"):
            pipe.step(x, target=x, loss_fn=functional.mse_loss)
            with torch.no_grad():
                for _ in range(step):
                    pipe(x)


def held(
    folder: Path,
    x: Tensor,
    y: Tensor,
    loss_fn: Callable[..., Tensor],
    adds_up: bool = False,
    dp: int = 1,
) -> tuple[int, int]:
    """What this rank was predicted to hold in a step, and what it does; it may not be the first."""
    pipe = load(folder, distributed=True, dp=dp)
    pipe.step(x, target=y, loss_fn=loss_fn)
    if not adds_up:
        pipe.zero_grad()
    with pipe.memory() as memory:
        pipe.step(x, target=y, loss_fn=loss_fn)
    (peak,) = memory.peaks
    return peak.predicted_bytes, peak.measured_bytes or 0


def shares_looked_at(folder: Path, out: Path) -> tuple[list[str], list[int]]:
    """What a rank's trace shows beside its row, and its peaks without shares and with them."""
    path = out / f"{torch.distributed.get_rank()}.json"
    peaks = []
    for fully_shard in (False, True):
        _, pipe = pair(folder, toys.SKIPS, dp=4, fully_shard=fully_shard)
        with pipe.trace(path):
            pipe.step(*toys.SKIPS.inputs(), loss_fn=toys.mean_loss)
        held = []
        for _ in range(3):  # in some steps a stage is gathered sooner than there is need
            pipe.zero_grad()
            with pipe.memory() as memory:
                pipe.step(*toys.SKIPS.inputs(), loss_fn=toys.mean_loss)
            held.append(memory.peaks[0].measured_bytes or 0)
        peaks.append(min(held))
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "copy"], peaks


def outputs_on_all(folder: Path) -> str:
    """Loaded so, each rank gets the output."""
    toy = toys.EARLY
    model, pipe = pair(folder, toy, outputs="all")
    inputs = toy.inputs()
    with torch.no_grad():
        output, expected = pipe(*inputs), model(*inputs)
    assert toys.same(output["logits"], expected["logits"])
    return "equal"


def refused(folder: Path, **settings: object) -> str:
    """The error that loading gives."""
    try:
        load(folder, distributed=True, **settings)  # type: ignore[arg-type]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def refused_folder(folders: Sequence[Path]) -> str:
    """The error where each rank has a package of its own."""
    return refused(folders[torch.distributed.get_rank()])


def refused_options(folder: Path, option: str, values: Sequence[object]) -> str:
    """The error where each rank loads with a value of its own."""
    return refused(folder, **{option: values[torch.distributed.get_rank()]})


def refused_settings(folder: Path, name: str, values: Sequence[object]) -> str:
    """The error where the package's loader finds on each rank a fact of its own."""
    value = values[torch.distributed.get_rank()]
    with mock.patch(f"fxpipe.runtime.distributed.package.{name}", return_value=value):
        return refused(folder)


def misused(folder: Path, m: int) -> list[str]:
    """The errors of calls that don't fit; a right one goes on after each."""
    _, pipe = pair(folder, toys.CHAIN)
    (x,) = toys.CHAIN.inputs()
    first = pipe._ranks.rank == 0
    found = []

    def tried(call: object) -> None:
        try:
            call()  # type: ignore[operator]
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        pipe.train()
        pipe.step(x, loss_fn=toys.mean_loss)

    tried(lambda: pipe.step(x if first else x[:4], loss_fn=toys.mean_loss))
    tried(lambda: pipe.step(x if first else x[:, :2], loss_fn=toys.mean_loss))
    tried(lambda: pipe.step(loss_fn=toys.mean_loss))
    tried(lambda: pipe.train(first).step(x, loss_fn=toys.mean_loss))
    tried(lambda: pipe(x))
    scaler = torch.amp.GradScaler("cpu") if first else None
    tried(lambda: pipe.step(x, loss_fn=toys.mean_loss, scaler=scaler))

    def with_a_hook() -> None:
        hooks = [pipe.register_forward_hook(lambda *_: None)] if first else []
        try:
            pipe.step(x, loss_fn=toys.mean_loss)
        finally:
            for hook in hooks:
                hook.remove()

    tried(with_a_hook)

    def with_gradients_on(here: bool, call: Callable[[], object]) -> None:
        with torch.set_grad_enabled(here):
            call()

    tried(lambda: with_gradients_on(first, lambda: pipe.step(x, loss_fn=toys.mean_loss)))
    tried(lambda: with_gradients_on(first, lambda: pipe(x)))
    return found


def frozen_in_part(folder: Path, dp: int) -> str:
    """The error where the last rank alone freezes what others hold too; then all do, and go on."""
    _, pipe = pair(folder, toys.TIED, dp=dp, timeout_s=5)
    inputs, last = toys.TIED.inputs(), pipe._ranks.world_rank == pipe._ranks.size * dp - 1
    pipe.requires_grad_(not last)
    try:
        pipe.step(*inputs, loss_fn=toys.mean_loss)
    except InputError as error:
        pipe.requires_grad_()
        pipe.step(*inputs, loss_fn=toys.mean_loss)
        return str(error)
    return "no error"


def mistaken(folder: Path, name: str, m: int, dp: int = 1) -> list[int]:
    """How often this rank's first stage ran in each step; the last rank's loss is another once."""
    toy = toys.TOYS[name]
    model, pipe = pair(folder, toy, dp=dp)
    inputs = toy.inputs(2 * m * dp)
    own = [x.chunk(dp)[pipe._ranks.replica] for x in inputs]
    ran: list[None] = []
    pipe._stages[0].module.register_forward_hook(lambda *_: ran.append(None))

    def other(output: object, target: object) -> Tensor:
        return toys.mean_loss(output, target)

    counts = []
    for k in range(5):
        ran.clear()
        torch.manual_seed(3)
        expected = toys.plain_step(toy, model, inputs, m, name == "noisy")
        torch.manual_seed(3)
        loss_fn = other if pipe.is_last and k == 2 else toys.mean_loss
        assert toys.same(pipe.step(*own, loss_fn=loss_fn), expected)
        toys.assert_same_state(pipe, model)
        counts.append(len(ran))
    return counts


def failing(folder: Path, where: str) -> tuple[str, str]:
    """The errors of a step that fails and of the next one."""
    _, pipe = pair(folder, toys.CHAIN)
    (x,) = toys.CHAIN.inputs()
    pipe.step(x, loss_fn=toys.mean_loss)
    said = {"stage": "a bad row", "garbled": f"a bad row {chr(0xDC80)}{'x' * 30_000_000}"}
    if where in said and pipe.is_last:
        module = pipe._stages[-1].module
        module.register_forward_pre_hook(fail_at(2, said[where]))
    other = load(folder, distributed=True)
    losses = {
        "loss": _bad_loss,
        "inside": lambda *_: pipe.step(x, loss_fn=toys.mean_loss),
        "other": lambda *_: other.step(x, loss_fn=toys.mean_loss),
    }
    loss_fn = losses.get(where, toys.mean_loss)
    found = []
    for _ in range(2):
        try:
            pipe.step(x, loss_fn=loss_fn)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found[0], found[1]


def fail_at(i: int, said: str = "a bad row") -> object:
    seen = []

    def hook(*_: object) -> None:
        seen.append(None)
        if len(seen) == i + 1:
            raise ValueError(said)

    return hook


def _bad_loss(output: Tensor, _: object) -> Tensor:
    raise ZeroDivisionError("no rows")


def adam(toy: toys.Toy, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """A group for the model's last layer, which is on one rank, and one for the others."""
    layer = list(dict(toy.model().named_parameters()))[-1].rpartition(".")[0]
    groups: list[list[Tensor]] = [[], []]
    for name, parameter in model.named_parameters():
        groups[name.startswith(layer)].append(parameter)
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": lr / 2}], lr)


def saved(folder: Path, name: str, m: int, path: Path) -> str:
    """Two steps under this plan, then a checkpoint."""
    toy = toys.TOYS[name]
    _, pipe = pair(folder, toy)
    optimizer = adam(toy, pipe, 0.05)
    for _ in range(2):
        optimizer.zero_grad()
        pipe.step(*toy.inputs(), loss_fn=toys.mean_loss)
        optimizer.step()
    checkpoint.save(path, pipe, optimizer, {"step": 2, "rank": pipe._ranks.rank})
    return "saved"


def scattered(folder: Path, paths: Sequence[Path]) -> list[str]:
    """The errors of checkpoints whose parts land apart, and where something else is."""
    _, pipe = pair(folder, toys.CHAIN)
    found = []
    for path in (paths[pipe._ranks.rank], folder):
        try:
            checkpoint.save(path, pipe)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def refused_checkpoints(folder: Path, path: Path) -> list[str]:
    """The errors where one rank's optimizer trains something else, and where nothing was saved."""
    model, pipe = pair(folder, toys.CHAIN)
    other = [nn.Parameter(torch.zeros(2))] if pipe.is_last else []
    optimizer = torch.optim.SGD([*pipe.parameters(), *other], 0.1)
    found = []
    for call in (checkpoint.save, checkpoint.load):
        try:
            call(path, pipe, optimizer)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    (x,) = toys.CHAIN.inputs()
    expected = toys.plain_step(toys.CHAIN, model, (x,), 3)
    assert toys.same(pipe.step(x, loss_fn=toys.mean_loss), expected)
    return found


def refused_zero(folder: Path, path: Path) -> list[str]:
    """The errors where replicas share out the states by an optimizer that wraps another."""
    _, pipe = pair(folder, toys.CHAIN, dp=2)
    group = pipe.mesh["dp"].get_group()
    zero = ZeroRedundancyOptimizer(pipe.parameters(), torch.optim.AdamW, group, lr=0.05)
    plain = path.with_name("plain")
    checkpoint.save(plain, pipe, torch.optim.AdamW(pipe.parameters(), 0.05))
    found = []
    for call, place in ((checkpoint.save, path), (checkpoint.load, plain)):
        try:
            call(place, pipe, zero)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def resumed(folder: Path, name: str, m: int, path: Path) -> str:
    """A third step under this plan gives what three give the plain model."""
    toy = toys.TOYS[name]
    model, pipe = pair(folder, toy)
    plain = adam(toy, model, 0.05)
    for _ in range(3):
        plain.zero_grad()
        toys.plain_step(toy, model, toy.inputs(), m)
        plain.step()
    optimizer = adam(toy, pipe, 1.0)
    assert checkpoint.load(path, pipe, optimizer) == {"step": 2, "rank": 0}
    # Also of a group whose parameters are all on the other rank.
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.025]
    pipe.step(*toy.inputs(), loss_fn=toys.mean_loss)
    optimizer.step()
    values = dict(model.named_parameters())
    assert all(toys.same(p, values[name]) for name, p in pipe.named_parameters())
    return "equal"


def threads_left(folder: Path) -> int:
    """How many threads there are more after pipelines have come and gone."""
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        _, pipe = pair(folder, toys.TIED)
        pipe.step(*toys.TIED.inputs(), loss_fn=toys.mean_loss)
        del pipe
        gc.collect()
    return len(os.listdir("/proc/self/task")) - before


def carries_shares(folder: Path) -> bool:
    """Whether what ranks sum themselves goes through a group that carries the CPU's tensors too."""
    _, pipe = pair(folder, toys.SCALED, dp=2, fully_shard=True)
    asked = []
    sum_up = torch.distributed.all_reduce

    def all_reduce(
        tensor: Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None
    ) -> None:
        asked.append(group)
        sum_up(tensor, op, group)

    with mock.patch.object(torch.distributed, "all_reduce", all_reduce):
        pipe.step(*toys.SCALED.inputs(4), loss_fn=toys.mean_loss)
    return set(asked) == {pipe._ranks.replica_group}


def on_gpus(folder: Path, name: str, m: int, dp: int, fully_shard: bool = False) -> str:
    """Two steps on GPUs, of which the second knows what the ranks send each other."""
    toy = toys.TOYS[name]
    rank, n_gpus = torch.distributed.get_rank(), torch.cuda.device_count()
    apart: AbstractContextManager[object] = nullcontext()
    if n_gpus < torch.distributed.get_world_size():
        # NCCL lets ranks share a GPU that are on different hosts, as far as it knows; we don't.
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo")
        apart = mock.patch.object(stream, "hardware", lambda device: f"{device} of rank {rank}")
    with apart:
        model, pipe = pair(
            folder, toy, devices=f"cuda:{rank % n_gpus}", dp=dp, fully_shard=fully_shard
        )
    for _ in range(2):
        torch.manual_seed(3)
        inputs = toy.inputs()
        expected = toys.plain_step(toy, model, inputs, m, name == "noisy")
        if dp > 1:
            inputs = tuple(x.chunk(dp)[pipe._ranks.replica] for x in inputs)
        torch.manual_seed(3)
        loss = pipe.step(*inputs, loss_fn=toys.mean_loss)
        if name != "noisy":  # other random numbers than a CPU's
            assert toys.same(loss, expected)
    if name != "noisy":
        toys.assert_same_state(pipe, model)
    pipe.clip_grad_norm_(1.0)
    pipe.eval()
    with torch.no_grad():
        pipe(*inputs)
    return "equal"


def told(folder: Path, batches: Sequence[int]) -> int:
    """How often steps of these batch sizes made the ranks tell each other dtypes."""
    _, pipe = pair(folder, toys.SKIPS)
    for batch in batches:
        pipe.step(*toys.SKIPS.inputs(batch), loss_fn=toys.mean_loss)
    return len(pipe._layouts)


def weights_saved(folder: Path, name: str, paths: Sequence[Path], dp: int = 1) -> list[str]:
    """Save the weights to each path, as small shards or one file; what this rank wrote of them."""
    model, pipe = pair(folder, toys.TOYS[name], dp=dp)
    opened: list[str] = []
    write = saving.write

    def spy(path: Path, *rest: Any) -> None:
        opened.append(path.name)
        write(path, *rest)

    with mock.patch.object(saving, "write", spy):
        for path in paths:
            pipe.save_weights(path, 200)
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter.zero_()
            pipe.load_weights(path)
            state = model.state_dict()
            assert all(torch.equal(t, state[name]) for name, t in pipe.state_dict().items())
    return opened


def weights_refused(folder: Path, path: Path) -> list[str]:
    """What loading says, on a rank that has its part and on one that has not; nothing is loaded."""
    model, pipe = pair(folder, toys.TIED)
    state = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    lacking = {name: tensor for name, tensor in state.items() if name != "mid.weight"}
    misshapen = {**state, "mid.bias": torch.zeros(3)}
    loads: list[Callable[[], object]] = [lambda: pipe.load_weights(path)]
    loads += [partial(pipe.load_state_dict, given) for given in (lacking, misshapen)]
    found = []
    for load_them in loads:
        try:
            load_them()
        except WeightsError as error:
            found.append(str(error))
    plain = model.state_dict()
    assert all(torch.equal(t, plain[name]) for name, t in pipe.state_dict().items())
    pipe.load_state_dict(pipe.state_dict())
    return found


def weights_of_its_own(folder: Path, paths: Sequence[Path]) -> tuple[str, bool]:
    """What loading says where each rank has a file of its own, and whether its weights changed."""
    model, pipe = pair(folder, toys.TIED)
    found = "loaded"
    try:
        pipe.load_weights(paths[torch.distributed.get_rank()])
    except WeightsError as error:
        found = str(error)
    plain = model.state_dict()
    changed = any(not torch.equal(t, plain[name]) for name, t in pipe.state_dict().items())
    pipe.step(*toys.TIED.inputs(), loss_fn=toys.mean_loss)
    return found, changed


def weights_not_saved(folder: Path, path: Path) -> str:
    """The error where rank 1's disk is full; the next step goes on."""
    _, pipe = pair(folder, toys.TIED)
    pipe.save_weights(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    found = ""
    with mock.patch.object(saving, "write", full if pipe.is_last else saving.write):
        try:
            pipe.save_weights(path)
        except WeightsError as error:
            found = str(error)
    pipe.step(*toys.TIED.inputs(), loss_fn=toys.mean_loss)
    return found


def some_inputs(folder: Path) -> list[str]:
    """Each rank gives what its own stages read; the errors where one doesn't."""
    model, pipe = pair(folder, toys.LATE)
    x, shift = toys.LATE.inputs()
    shift.requires_grad_()
    first = pipe._ranks.rank == 0
    expected = toys.mean_loss(model(x, shift))
    expected.backward()
    wanted, shift.grad = shift.grad, None
    step = partial(pipe.step, loss_fn=toys.mean_loss)
    for run in (
        lambda: step(x) if first else step(shift=shift),
        lambda: step(x if first else None, None if first else shift),
        lambda: step(x, shift=None if first else shift),
    ):
        pipe.zero_grad()
        shift.grad = None
        assert toys.same(run(), expected)
        toys.assert_same_state(pipe, model)
        assert toys.same(shift.grad, None if first else wanted)
    with torch.no_grad():
        output = pipe(x) if first else pipe(shift=shift)
        assert first or toys.same(output, model(x, shift))
    errors = []
    for run in (lambda: step(x), lambda: step(shift=shift), lambda: step(None, shift, mask=x)):
        try:
            run()
        except InputError as error:
            errors.append(str(error))
    return errors
