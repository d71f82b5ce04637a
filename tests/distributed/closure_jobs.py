"""What ranks are asked to do with a runner: each compares with the plain program in its process."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import toys
from jobs import everything, fail_at, pair
from part_toy import BODY, Branching
from programs import Program, plain
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpipe import checkpoint
from fxpipe.runtime import Runner, load, splice
from fxpipe.runtime.distributed.dtensors import local, share_of
from fxpipe.runtime.distributed.pipeline import DistributedPipeline
from fxpipe.runtime.random import microbatch_seeds


def steps(folder: Path, name: str, m: int, batches: Sequence[int], frozen: str) -> str:
    """Steps of several batch sizes, whose gradients add up; gives a digest of those around."""
    toy = toys.TOYS[name]
    model, pipe = pair(folder, toy)
    expected, program = Program(model, toy, frozen), Program(pipe, toy, frozen)
    runner = Runner(m)
    for batch in batches:
        inputs = toy.inputs(batch)
        torch.manual_seed(5)
        losses = plain(expected, toy, inputs, min(m, batch))
        torch.manual_seed(5)
        found = runner.step(lambda *piece: program(*piece, share=runner.share), *inputs)
        assert all(toys.same(a, b) for a, b in zip(found, losses, strict=True)), (found, losses)
        toys.assert_same_state(pipe, model)
        toys.assert_same_state(program, expected)
    gradients = [p.grad.numpy().tobytes() for p in program.parameters() if p.grad is not None]
    assert gradients
    return hashlib.sha256(b"".join(gradients)).hexdigest()


def failing(folder: Path, where: str, rank: int) -> tuple[str, str]:
    """The errors of a step in which something fails on `rank`, and of the next one."""
    _, pipe = pair(folder, toys.CHAIN)
    (x,) = toys.CHAIN.inputs()
    here, begun = pipe._ranks.rank == rank, []

    def closure(piece: Tensor) -> None:
        i = len(begun)
        begun.append(None)
        if here and where == f"before {i}":
            raise KeyError("mine")
        y = pipe(piece[:, :5] if here and where == f"call {i}" else piece)
        if here and where == f"after {i}":
            raise KeyError("mine")
        y.mean().backward()

    if where == "stage" and here:
        pipe._stages[-1].module.register_forward_pre_hook(fail_at(2))
    return tuple(error_of(lambda: Runner(4).step(closure, x)) for _ in range(2))


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def differing_weights(folder: Path, settings: dict[str, Any]) -> dict[str, set[str]]:
    """Whose weights a rank has in calls before which each has loaded those of a model of its own.

    Of a share, whose parts are of several models, it is those of the part that is here.
    """
    toy = toys.TIED
    pipe = load(folder, distributed=True, **settings)
    assert isinstance(pipe, DistributedPipeline)
    x, runner = toy.inputs()[0], Runner(3, around=())
    models = []
    for seed in range(pipe._ranks.world_size):
        torch.manual_seed(seed)
        models.append(toy.model().double().state_dict())

    def evaluate() -> None:
        with torch.no_grad():
            pipe(x)

    def step() -> None:
        pipe.step(x, loss_fn=toys.mean_loss)

    def closures() -> None:
        runner.step(lambda x: (pipe(x).mean() * runner.share).backward(), x)

    found: dict[str, set[str]] = {}
    for run in (step, evaluate, closures, step):
        pipe.load_state_dict(models[pipe._ranks.world_rank])
        run()
        for name, tensor in pipe.state_dict().items():
            own = [local(share_of(tensor, model[name])) for model in models]
            of = [str(k) for k, other in enumerate(own) if toys.same(local(tensor), other)]
            found.setdefault(name, set()).add(" ".join(of))
    return found


def without_gradients(folder: Path) -> str:
    """Under no_grad, around the step or in the closure, all ranks get the outputs."""
    toy = toys.NOISY
    model, pipe = pair(folder, toy)
    (x,) = toy.inputs()

    def inside(piece: Tensor) -> Tensor:
        with torch.no_grad():
            return pipe(piece)

    torch.manual_seed(1)
    expected = toys.microbatched_outputs(toy, model, (x,), 4, random=True)
    torch.manual_seed(1)
    with torch.no_grad():
        found = [Runner(4).step(lambda piece: pipe(piece), x)]
    torch.manual_seed(1)
    found.append(Runner(4).step(inside, x))
    for outputs in found:
        assert not any(output.requires_grad for output in outputs)
        assert all(toys.same(a, b) for a, b in zip(outputs, expected, strict=True))
    return "equal"


def in_place(folder: Path) -> str:
    """A closure may write into what it is given, and so may `.grad` be written into."""
    toy = toys.EARLY
    model, pipe = pair(folder, toy)
    ours, theirs = toy.inputs(), toy.inputs()
    for inputs in (ours, theirs):
        inputs[1].data = torch.arange(6).double()
        inputs[1].requires_grad_()

    def closure(x: Tensor, shift: Tensor, run: Callable[..., Any] = pipe) -> None:
        output = run(x, shift)
        loss = output["logits"].mul_(2).pow(2).sum() + output["aux"].exp_().sum()
        loss.backward()

    for _ in range(3):
        Runner(4).step(closure, *ours)
        for piece in toys.pieces(toy, theirs, 4):
            closure(*piece, run=model)
        toys.assert_same_state(pipe, model)
        assert toys.same(ours[1].grad, theirs[1].grad)
    return "equal"


def differing(folder: Path) -> list[str]:
    """The errors of steps that are not alike on all ranks; a right one goes on after each."""
    _, pipe = pair(folder, toys.CHAIN)
    (x,) = toys.CHAIN.inputs()
    rank = pipe._ranks.rank
    factor = {"before": 1.0, "after": 1.0}

    def closure(piece: Tensor) -> None:
        (pipe(piece * factor["before"]) * factor["after"]).mean().backward()

    def tried(call: Callable[[], object]) -> str:
        error = error_of(call)
        pipe.train()
        factor.update(before=1.0, after=1.0)
        assert error_of(lambda: Runner(4).step(closure, x)) == "none"
        return error

    def with_factor(where: str) -> None:
        factor[where] += rank
        Runner(4).step(closure, x)

    def unequal_gradients() -> None:
        with torch.set_grad_enabled(rank == 0):
            Runner(4).step(lambda piece: pipe(piece), x)

    return [
        tried(lambda: with_factor("before")),
        tried(lambda: with_factor("after")),
        tried(lambda: Runner(4).step(closure, x[: 3 + 7 * rank])),
        tried(lambda: Runner(4).step(closure, x.clone().requires_grad_(rank == 0))),
        tried(unequal_gradients),
        tried(lambda: pipe.train(rank == 0) and Runner(4).step(closure, x)),
    ]


def scaled(folder: Path, autocast: bool) -> list[tuple[float, bool]]:
    """The scale, and whether weights changed, after steps of which the first overflows on rank 1.

    Rank 0's own gradients are finite in both, under autocast or not.
    """
    _, pipe = pair(folder, toys.CHAIN)
    pipe.float()
    (x,) = toys.CHAIN.inputs()
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    weight = next(pipe.parameters())
    hook = weight.register_hook(lambda g: g * torch.inf if pipe._ranks.rank else g)

    def closure(piece: Tensor) -> None:
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = pipe(piece).pow(2).mean()
        scaler.scale(loss).backward()

    found = []
    for _ in range(2):
        before = weight.detach().clone()
        Runner(4).step(closure, x.float())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        hook.remove()
        found.append((scaler.get_scale(), not torch.equal(weight, before)))
    return found


def spliced(folder: Path, m: int) -> str:
    """A model around a part, made with another seed on each rank, trains as the plain one."""
    pipe = load(folder, distributed=True)
    assert isinstance(pipe, DistributedPipeline)
    torch.manual_seed(pipe._ranks.rank)
    model = splice(Branching().double(), pipe)
    held = {name for name, _ in model.named_parameters()}
    assert {name for name in held if name.startswith("body")} == {
        f"body.{2 * pipe._ranks.rank}.{kind}" for kind in ("weight", "bias")
    }
    plain = Branching().double()
    plain.load_state_dict(everything(pipe))
    # Before batch norm a bias gets rounding for a gradient, of which a small eps makes a step.
    optimizers = [torch.optim.AdamW(each.parameters(), 0.05, eps=1e-3) for each in (model, plain)]
    runner = Runner(m)

    def closure(x: Tensor, run: nn.Module, share: float) -> Tensor:
        loss = run(x).pow(2).mean()
        (loss * share).backward()
        return loss.detach()

    for batch in (10, 8):
        (x,) = BODY.inputs(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.manual_seed(4)
        found = runner.step(lambda piece: closure(piece, model, runner.share), x)
        torch.manual_seed(4)
        seeds = microbatch_seeds(m)
        for seed, piece, loss in zip(seeds, x.split(toys.rows(batch, m)), found, strict=True):
            torch.manual_seed(seed)
            assert toys.same(loss, closure(piece, plain, len(piece) / batch))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert toys.same(pipe.clip_grad_norm_(0.1, around=model.parameters()), norm)
        toys.assert_same_state(model, plain)
        for optimizer in optimizers:
            optimizer.step()
    values = plain.state_dict()
    assert all(toys.same(t.double(), values[name].double()) for name, t in model.named_buffers())
    assert all(toys.same(p, values[name]) for name, p in model.named_parameters())
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        assert toys.same(model(x), plain(x))
    return "equal"


def spliced_checkpoint(folder: Path, path: Path) -> list[str]:
    """The errors of a checkpoint of the model around a part; that of the pipeline has it all."""
    pipe = load(folder, distributed=True)
    model = splice(Branching().double(), pipe)
    optimizer = torch.optim.AdamW(model.parameters())
    calls = (checkpoint.save, checkpoint.load)
    found = [error_of(partial(call, path, model)) for call in calls]
    checkpoint.save(path, pipe, optimizer)
    plain = Branching().double()
    checkpoint.load(path, plain)
    values = plain.state_dict()
    assert all(toys.same(tensor, values[name]) for name, tensor in model.state_dict().items())
    return found


def clipped(folder: Path) -> str:
    """A norm over the stages and over what stands around them, which counts once."""
    toy = toys.CHAIN
    model, pipe = pair(folder, toy)
    expected, program = Program(model, toy), Program(pipe, toy)
    inputs = toy.inputs()
    torch.manual_seed(5)
    plain(expected, toy, inputs, 4)
    torch.manual_seed(5)
    Runner(4).step(lambda *piece: program(*piece, share=len(piece[0]) / 10), *inputs)
    norm = nn.utils.clip_grad_norm_([*model.parameters(), *expected.parameters()], 0.1)
    assert toys.same(pipe.clip_grad_norm_(0.1, around=program.parameters()), norm)
    toys.assert_same_state(pipe, model)
    toys.assert_same_state(program, expected)
    return "equal"


def replicated(folder: Path, rows: Sequence[int], settings: dict[str, Any]) -> str:
    """Two replicas with batches of these sizes are the plain program on both together.

    Its gradients add up over two steps; the layer before the pipeline gets them too.
    """
    toy = toys.CHAIN
    model, pipe = pair(folder, toy, dp=2, **settings)
    torch.manual_seed(3)
    expected = [nn.Linear(6, 6).double(), nn.Linear(2, 1).double()]
    around = nn.ModuleList(copy.deepcopy(expected))
    runner = Runner(4, around=[*around.parameters(), *pipe.parameters()])

    def loss_of(run: nn.Module, layers: Sequence[nn.Module], x: Tensor) -> Tensor:
        return layers[1](run(layers[0](x))[:, :2]).pow(2).mean()

    def closure(x: Tensor) -> None:
        (loss_of(pipe, list(around), x) * runner.share).backward()

    (x,) = toy.inputs(sum(rows))
    for _ in range(2):
        runner.step(closure, x.split(list(rows))[pipe._ranks.replica])
        loss_of(model, expected, x).backward()
    toys.assert_same_state(around, nn.ModuleList(expected))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in pipe.named_parameters():
        assert toys.same(whole(parameter.grad), gradients[name]), name
    return "equal"


def equal_over_replicas(pipe: DistributedPipeline) -> bool:
    """Whether this rank's state is that of the rank in the first replica."""
    states = pipe._ranks.gather_world(pipe.state_dict())
    own, first = (states[rank] for rank in (pipe._ranks.world_rank, pipe._ranks.rank))
    return all(map(toys.same, own.values(), first.values()))


def replicated_splice(folder: Path, rows: Sequence[int]) -> str:
    """Two replicas of a model around a part of it are the plain one on all their rows.

    Gradients add up over two steps, and are clipped by the norm over the stages and around them.
    """
    pipe = load(folder, distributed=True, dp=2)
    assert isinstance(pipe, DistributedPipeline)
    torch.manual_seed(pipe._ranks.world_rank)
    model, plain = splice(Branching().double(), pipe), Branching().double()
    assert equal_over_replicas(pipe)
    plain.load_state_dict(everything(pipe))
    for each in (model, plain):
        each.eval()  # a batch norm's mean is over a micro-batch
    runner = Runner(4, around=model.parameters())

    def closure(x: Tensor) -> None:
        (model(x).pow(2).mean() * runner.share).backward()

    x = BODY.inputs(sum(rows))[0].abs()
    with torch.no_grad():
        for parameter in (*model.embed.parameters(), *plain.embed.parameters()):
            parameter.abs_()  # so that all micro-batches take the same branch
    for _ in range(2):
        runner.step(closure, x.split(list(rows))[pipe._ranks.replica])
        plain(x).pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert toys.same(pipe.clip_grad_norm_(0.1, around=model.parameters()), norm)
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        assert toys.same(parameter.grad, gradients[name]), name
    return "equal"


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that replicas share out."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def replicated_wrongly(folder: Path) -> list[str]:
    """The errors of closures around two replicas."""
    _, pipe = pair(folder, toys.CHAIN, dp=2)
    (x,) = toys.CHAIN.inputs()
    early = Runner(4, around=())

    def reads_early(x: Tensor) -> None:
        share = early.share
        (pipe(x).mean() * share).backward()

    return [
        error_of(lambda: Runner(4).step(lambda x: pipe(x), x)),
        error_of(lambda: early.step(reads_early, x)),
    ]
