"""Small models, each beside the package that a compiler would write for it: stages as text."""

import ast
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpipe.runtime import Pipeline, load
from fxpipe.runtime.manifest import (
    FORMAT,
    EstimateSpec,
    InputSpec,
    Manifest,
    OutputSpec,
    PortSpec,
    SegmentSpec,
    StageSpec,
    StateSpec,
    TensorSpec,
)
from fxpipe.runtime.random import microbatch_seeds
from fxpipe.runtime.structure import describe

BATCH = 10
MODES = ["never", "except_last", "always", "segment"]


@dataclass(frozen=True)
class Part:
    """A stage: its file, which stage each argument comes from, and what it returns."""

    text: str
    sources: tuple[int | None, ...]
    outputs: tuple[str, ...]
    mutated: tuple[str, ...] = ()
    random: bool = False


@dataclass(frozen=True)
class Toy:
    """An original model, its inputs for a batch, and its stages."""

    model: type[nn.Module]
    parts: tuple[Part, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    integer: bool = False
    unbatched: tuple[str, ...] = ()

    def inputs(self, batch: int = BATCH) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        if self.integer:
            return (torch.randint(0, 11, (batch, 5), generator=generator),)
        x = torch.randn(batch, 6, dtype=torch.float64, generator=generator)
        return (x, *(torch.randn(6, dtype=torch.float64) for _ in self.unbatched))


def gpipe(n: int, m: int) -> str:
    """Each device runs all its forwards, then all its backwards, last micro-batch first."""
    rows = [
        [f"{j}F{i}" for i in range(m)] + [f"{j}B{i}" for i in reversed(range(m))] for j in range(n)
    ]
    return "".join(",".join(row) + "\n" for row in rows)


def one_f_one_b(n: int, m: int) -> str:
    """Each device begins backwards as soon as they come."""
    rows = []
    for j in range(n):
        ahead = min(n - j, m)
        row = [f"{j}F{i}" for i in range(ahead)]
        for i in range(m):
            row.append(f"{j}B{i}")
            if ahead + i < m:
                row.append(f"{j}F{ahead + i}")
        rows.append(row)
    return "".join(",".join(row) + "\n" for row in rows)


def split(n: int, m: int) -> str:
    """1F1B with halved backwards: a weight's gradient comes after the next one's forward."""
    rows = []
    for line in one_f_one_b(n, m).splitlines():
        row = [cell.replace("B", "I") for cell in line.split(",")]
        for i in range(m):
            j = row[0][0]
            row.insert(min(row.index(f"{j}I{i}") + 2, len(row)), f"{j}W{i}")
        rows.append(row)
    return "".join(",".join(row) + "\n" for row in rows)


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "split": split}


def write(
    folder: Path,
    toy: Toy,
    m: int = 4,
    schedule: str = "gpipe",
    checkpoint: str = "never",
    devices: tuple[int, ...] | None = None,
    table: str | None = None,
) -> Path:
    """Write the toy's package; `devices` is each stage's lane, `table` stands for `schedule`'s.

    Where `checkpoint` is "segment", all of each stage is a part that its code recomputes.
    """
    torch.manual_seed(0)
    model = toy.model().double()
    n = len(toy.parts)
    lanes = devices or tuple(range(n))
    values: dict[tuple[int | None, str], TensorSpec] = {}
    inputs = []
    tensors = toy.inputs()
    signature = _arguments(toy.model)
    for name, tensor in zip(signature, tensors, strict=True):
        values[None, name] = _spec(tensor)
        inputs.append(InputSpec(name, name not in toy.unbatched, values[None, name]))
    stages = []
    at_hand: dict[tuple[int | None, str], Tensor] = {
        (None, name): tensor for name, tensor in zip(signature, tensors, strict=True)
    }
    for j, part in enumerate(toy.parts):
        source = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n\n"
        source += f"class Stage{j}(nn.Module):\n" + textwrap.indent(
            textwrap.dedent(part.text), "    "
        )
        if checkpoint == "segment":
            source = _in_a_segment(source)
        (folder / f"stage_{j}.py").write_text(source)
        scope: dict[str, type[nn.Module]] = {}
        exec(compile(source, f"stage_{j}.py", "exec"), scope)
        stage = scope[f"Stage{j}"]().double()
        names = _arguments(scope[f"Stage{j}"], source)
        keys = list(zip(part.sources, names, strict=True))
        returned = stage(*(at_hand[key] for key in keys))
        returned = returned if isinstance(returned, tuple) else (returned,)
        for value, tensor in zip(part.outputs, returned, strict=True):
            at_hand[j, value] = tensor
            values[j, value] = _spec(tensor, grad=tensor.requires_grad)
        stages.append(
            StageSpec(
                f"stage_{j}.py",
                f"Stage{j}",
                lanes[j],
                "never" if checkpoint == "segment" else checkpoint,
                part.random,
                1,
                tuple(
                    PortSpec(name, name, src, src not in (None, j - 1), values[src, name])
                    for src, name in keys
                ),
                tuple(OutputSpec(value, j, values[j, value]) for value in part.outputs),
                tuple(name for name, _ in stage.named_parameters()),
                tuple(name for name, _ in stage.named_buffers()),
                part.mutated,
                1.0,
                1.0,
                0,
                0,
                0,
                (SegmentSpec("part", "part", 1),) if checkpoint == "segment" else (),
            )
        )
    with torch.no_grad():
        structure, leaves = describe(model(*tensors))
    outputs = []
    for leaf in leaves:
        key = next(
            key
            for key, value in reversed(at_hand.items())
            if value.shape == leaf.shape and value.dtype == leaf.dtype
        )
        outputs.append(OutputSpec(key[1], key[0], values[key]))
    aliases = dict(toy.aliases)
    state = [
        StateSpec(name, "parameter", _spec(t, fixed=True, grad=t.requires_grad), aliases.get(name))
        for name, t in model.named_parameters(remove_duplicate=False)
    ] + [StateSpec(name, "buffer", _spec(t, fixed=True)) for name, t in model.named_buffers()]
    n_lanes = max(lanes) + 1
    manifest = Manifest(
        FORMAT,
        "0.1.0",
        torch.__version__,
        toy.model.__name__,
        "",
        BATCH,
        {},
        (),
        m,
        schedule,
        ("cpu",) * n_lanes,
        tuple(signature),
        describe(dict(zip(signature, tensors, strict=True)))[0],
        tuple(inputs),
        structure,
        tuple(outputs),
        tuple(stages),
        tuple(state),
        EstimateSpec(1.0, 0.0, (0,) * n_lanes),
        "dp",
        None,
        "",
        "",
        {},
    )
    (folder / "plan.json").write_text(manifest.to_json())
    if table is None:
        table = SCHEDULES[schedule](n, m) if devices is None else _merged(n, m, lanes)
    (folder / "schedule.csv").write_text(table)
    return folder


def _in_a_segment(source: str) -> str:
    """The forward as a part of its own, that a forward of the same arguments recomputes."""
    names = ", ".join(_arguments(nn.Module, source))
    forward = f"    def forward(self, {names}):\n        return checkpoint(self.part, {names})\n"
    import_ = "from fxpipe.runtime.segment import checkpoint\n"
    return f"{import_}{source.replace('def forward(', 'def part(')}\n{forward}"


def both(folder: Path, toy: Toy, **settings: object) -> tuple[nn.Module, Pipeline]:
    """The plain model in float64 and its pipeline with the same weights."""
    pipe = load(write(folder, toy, **settings))  # type: ignore[arg-type]
    torch.manual_seed(2)
    model = toy.model().double()
    pipe.load_state_dict(model.state_dict())
    return model, pipe


def rows(batch: int, m: int) -> list[int]:
    return [batch // m + (i < batch % m) for i in range(m)]


def pieces(toy: Toy, inputs: tuple[Tensor, ...], m: int) -> list[tuple[Tensor, ...]]:
    """The micro-batches of the inputs."""
    names = _arguments(toy.model)
    cut = [
        [x] * m if name in toy.unbatched else list(x.split(rows(len(x), m)))
        for name, x in zip(names, inputs, strict=True)
    ]
    return list(zip(*cut, strict=True))


def microbatched_outputs(
    toy: Toy, model: nn.Module, inputs: tuple[Tensor, ...], m: int, random: bool
) -> list[object]:
    """What the plain model gives micro-batch by micro-batch, each after its seed."""
    seeds = microbatch_seeds(m) if random else [None] * m
    outputs = []
    for seed, piece in zip(seeds, pieces(toy, inputs, m), strict=True):
        if seed is not None:
            torch.manual_seed(seed)
        outputs.append(model(*piece))
    return outputs


def _merged(n: int, m: int, lanes: tuple[int, ...]) -> str:
    """All forwards by micro-batch, then all backwards: several stages on a lane."""
    table: list[list[str]] = [[] for _ in range(max(lanes) + 1)]
    for i in range(m):
        for j in range(n):
            table[lanes[j]].append(f"{j}F{i}")
    for i in reversed(range(m)):
        for j in reversed(range(n)):
            table[lanes[j]].append(f"{j}B{i}")
    return "".join((",".join(row) or '""') + "\n" for row in table)


def _arguments(module: type[nn.Module], source: str | None = None) -> list[str]:
    if source is None:
        code = module.forward.__code__
        return list(code.co_varnames[1 : code.co_argcount])
    tree = ast.parse(source)
    forward = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "forward"
    )
    return [argument.arg for argument in forward.args.args[1:]]


def _spec(tensor: Tensor, fixed: bool = False, grad: bool = False) -> TensorSpec:
    shape = tuple(n if fixed or n != BATCH else "batch" for n in tensor.shape)
    return TensorSpec(shape, str(tensor.dtype).removeprefix("torch."), grad)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.body = nn.ModuleDict({"step": nn.Linear(7, 7), "stages": nn.Linear(7, 7)})
        self.last = nn.Linear(7, 3)

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.tanh(self.body["stages"](torch.relu(self.body["step"](h)))))


CHAIN = Toy(
    Chain,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(6, 7)

            def forward(self, x):
                return self.first(x)
            """,
            (None,),
            ("h",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.body = nn.ModuleDict({"step": nn.Linear(7, 7)})

            def forward(self, h):
                return torch.relu(self.body["step"](h))
            """,
            (0,),
            ("g",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.body = nn.ModuleDict({"stages": nn.Linear(7, 7)})
                self.last = nn.Linear(7, 3)

            def forward(self, g):
                return self.last(torch.tanh(self.body["stages"](g)))
            """,
            (1,),
            ("y",),
        ),
    ),
)


class Skips(nn.Module):
    """`a` goes from stage 0 to 1, 2 and 3; `b` from 1 to 2 and 3."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)
        self.d = nn.Linear(8, 4)

    def forward(self, x):
        a = torch.tanh(self.a(x))
        b = torch.tanh(self.b(a))
        c = torch.tanh(self.c(b)) * a
        return self.d(c + a * b)


SKIPS = Toy(
    Skips,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)

            def forward(self, x):
                return torch.tanh(self.a(x))
            """,
            (None,),
            ("a_1",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.b = nn.Linear(8, 8)

            def forward(self, a_1):
                return torch.tanh(self.b(a_1))
            """,
            (0,),
            ("b_1",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.c = nn.Linear(8, 8)

            def forward(self, a_1, b_1):
                return torch.tanh(self.c(b_1)) * a_1
            """,
            (0, 1),
            ("c_1",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.d = nn.Linear(8, 4)

            def forward(self, c_1, a_1, b_1):
                return self.d(c_1 + a_1 * b_1)
            """,
            (2, 0, 1),
            ("y",),
        ),
    ),
)


class Tied(nn.Module):
    """Token ids in; the embedding is used again as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mid(self.embed(ids))))


TIED = Toy(
    Tied,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(11, 6)

            def forward(self, ids):
                return self.embed(ids)
            """,
            (None,),
            ("e",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.mid = nn.Linear(6, 6)

            def forward(self, e):
                return torch.tanh(self.mid(e))
            """,
            (0,),
            ("h",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(6, 11, bias=False)

            def forward(self, h):
                return self.head(h)
            """,
            (1,),
            ("y",),
        ),
    ),
    aliases=(("head.weight", "embed.weight"),),
    integer=True,
)


class Shares(nn.Module):
    """Four layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))
        self.b.weight = self.c.weight = self.d.weight = self.a.weight

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x).tanh()).tanh()).tanh())


SHARES = Toy(
    Shares,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 6)

            def forward(self, x):
                return self.a(x).tanh()
            """,
            (None,),
            ("f",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.b = nn.Linear(6, 6)

            def forward(self, f):
                return self.b(f).tanh()
            """,
            (0,),
            ("g",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.c = nn.Linear(6, 6)
                self.d = nn.Linear(6, 6)

            def forward(self, g):
                return self.d(self.c(g).tanh())
            """,
            (1,),
            ("y",),
        ),
    ),
    aliases=tuple((f"{name}.weight", "a.weight") for name in "bcd"),
)


class Noisy(nn.Module):
    """Dropout in three ways, in three stages; `q` lies in memory in another order than its dims."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.3)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 4)

    def forward(self, x):
        a = self.drop(self.a(x))
        q = F.dropout(self.b(a), 0.4, self.training).unflatten(1, (2, 4)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2 if self.training else 0.0)
        noise = 0.1 * (torch.rand_like(a) + torch.rand_like(q).flatten(1))
        return self.c(attended.flatten(1) + noise)


NOISY = Toy(
    Noisy,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.drop = nn.Dropout(0.3)

            def forward(self, x):
                return self.drop(self.a(x))
            """,
            (None,),
            ("a_1",),
            random=True,
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.b = nn.Linear(8, 8)

            def forward(self, a_1):
                q = F.dropout(self.b(a_1), 0.4, self.training)
                return q.unflatten(1, (2, 4)).transpose(1, 2)
            """,
            (0,),
            ("q",),
            random=True,
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.c = nn.Linear(8, 4)

            def forward(self, q, a_1):
                attended = F.scaled_dot_product_attention(
                    q, q, q, dropout_p=0.2 if self.training else 0.0
                )
                noise = 0.1 * (torch.rand_like(a_1) + torch.rand_like(q).flatten(1))
                return self.c(attended.flatten(1) + noise)
            """,
            (1, 0),
            ("y",),
            random=True,
        ),
    ),
)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.bn = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 8)
        self.bn2 = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.bn2(self.b(torch.relu(self.bn(self.a(x)))))


_COUNTERS = ("running_mean", "running_var", "num_batches_tracked")
NORMED = Toy(
    Normed,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.bn = nn.BatchNorm1d(8)

            def forward(self, x):
                return torch.relu(self.bn(self.a(x)))
            """,
            (None,),
            ("h",),
            mutated=tuple(f"bn.{name}" for name in _COUNTERS),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.b = nn.Linear(8, 8)
                self.bn2 = nn.BatchNorm1d(8)

            def forward(self, h):
                return self.bn2(self.b(h))
            """,
            (0,),
            ("y",),
            mutated=tuple(f"bn2.{name}" for name in _COUNTERS),
        ),
    ),
)


class Early(nn.Module):
    """An auxiliary head in the first stage; the value sent on is an output as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.aux = nn.Linear(8, 2)
        self.b = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x, shift):
        a = torch.tanh(self.a(x + shift * self.scale))
        return {"logits": self.b(a), "aux": self.aux(a), "hidden": a, "given": shift}


EARLY = Toy(
    Early,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.aux = nn.Linear(8, 2)
                self.scale = nn.Parameter(torch.ones(6))

            def forward(self, x, shift):
                a = torch.tanh(self.a(x + shift * self.scale))
                return self.aux(a), a
            """,
            (None, None),
            ("aux_1", "a_1"),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.b = nn.Linear(8, 3)

            def forward(self, a_1):
                return self.b(a_1)
            """,
            (0,),
            ("y",),
        ),
    ),
    unbatched=("shift",),
)


class Late(nn.Module):
    """One input is read by the first stage, the other by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 6)

    def forward(self, x, shift):
        return self.b(torch.tanh(self.a(x))) * shift


LATE = Toy(
    Late,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)

            def forward(self, x):
                return torch.tanh(self.a(x))
            """,
            (None,),
            ("a_1",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.b = nn.Linear(8, 6)

            def forward(self, a_1, shift):
                return self.b(a_1) * shift
            """,
            (0, None),
            ("y",),
        ),
    ),
    unbatched=("shift",),
)


class Whole(nn.Module):
    """Integer and bool values between stages; the mean over rows as a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        a = self.a(x)
        mask = a > 0
        order = a.argsort(1)
        y = self.b(a).gather(1, order) * mask
        return y, y.pow(2).mean(), order


WHOLE = Toy(
    Whole,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)

            def forward(self, x):
                a = self.a(x)
                return a, a > 0, a.argsort(1), a.detach() * 2
            """,
            (None,),
            ("a_1", "mask", "order", "unused"),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.b = nn.Linear(8, 8)

            def forward(self, a_1, order, unused):
                return self.b(a_1).gather(1, order)
            """,
            (0, 0, 0),
            ("g",),
        ),
        Part(
            """
            def forward(self, g, mask):
                y = g * mask
                return y, y.pow(2).mean()
            """,
            (1, 0),
            ("y", "mean"),
        ),
    ),
)


class Waves(nn.Module):
    """Complex values between stages, and views that read memory as conjugate or negative."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 4)

    def forward(self, x):
        waves = torch.view_as_complex(self.a(x).view(-1, 4, 2)).conj()
        return self.b(torch.view_as_real(waves.resolve_conj()).flatten(1)) * waves.imag


WAVES = Toy(
    Waves,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)

            def forward(self, x):
                waves = torch.view_as_complex(self.a(x).view(-1, 4, 2)).conj()
                return waves, waves.imag
            """,
            (None,),
            ("waves", "imag"),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.b = nn.Linear(8, 4)

            def forward(self, waves):
                return self.b(torch.view_as_real(waves.resolve_conj()).flatten(1))
            """,
            (0,),
            ("heights",),
        ),
        Part(
            """
            def forward(self, heights, imag):
                return heights * imag
            """,
            (1, 0),
            ("y",),
        ),
    ),
)


class Scaled(nn.Module):
    """Parameters without dimensions, without a gradient, and frozen; statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.idle = nn.Parameter(torch.ones(3))
        self.bn = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 3)
        self.b.bias.requires_grad_(False)

    def forward(self, x):
        return self.b(self.bn(torch.tanh(self.a(x)) * self.scale))


SCALED = Toy(
    Scaled,
    (
        Part(
            """
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 8)
                self.scale = nn.Parameter(torch.tensor(1.5))
                self.idle = nn.Parameter(torch.ones(3))

            def forward(self, x):
                return torch.tanh(self.a(x)) * self.scale
            """,
            (None,),
            ("h",),
        ),
        Part(
            """
            def __init__(self):
                super().__init__()
                self.bn = nn.BatchNorm1d(8)
                self.b = nn.Linear(8, 3)

            def forward(self, h):
                return self.b(self.bn(h))
            """,
            (0,),
            ("y",),
            mutated=tuple(f"bn.{name}" for name in _COUNTERS),
        ),
    ),
)

TOYS = {
    "chain": CHAIN,
    "skips": SKIPS,
    "tied": TIED,
    "noisy": NOISY,
    "normed": NORMED,
    "early": EARLY,
    "whole": WHOLE,
    "waves": WAVES,
}


def mean_loss(output: object, target: object = None) -> Tensor:
    """A mean over the rows, of all floats of the output; its scalars are such means already."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in describe(output)[1]:
        if leaf.is_floating_point() and leaf.requires_grad:
            rows_ = leaf.pow(2).flatten(1).sum(1) if leaf.dim() > 1 else leaf.pow(2).sum()
            total = total + (rows_.mean() if leaf.dim() else leaf)
    return total


def plain_step(
    toy: Toy,
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    m: int,
    random: bool = False,
    share: float = 1.0,
) -> Tensor:
    """The plain model micro-batch by micro-batch: backward of `share` of the batch's mean."""
    batch = len(inputs[0])
    loss = torch.zeros((), dtype=torch.float64)
    outputs = microbatched_outputs(toy, model, inputs, m, random)
    for output, n in zip(outputs, rows(batch, m), strict=True):
        loss = loss + mean_loss(output) * (n / batch)
    (loss * share).backward()
    return loss.detach()


def same(found: Tensor | None, expected: Tensor | None) -> bool:
    """Equal to 1e-10 of the largest value; 1e-14 is zero, as a bias before batch norm gets."""
    if found is None or expected is None:
        return found is expected
    found, expected = _whole(found.detach()).cpu(), expected.detach()
    limit = 1e-10 * max(1e-4, float(expected.abs().max()))
    return found.shape == expected.shape and bool(((found - expected).abs() <= limit).all())


def _whole(tensor: Tensor) -> Tensor:
    """All of one of which this process may have a share."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full else tensor


def assert_same_state(pipe: nn.Module, model: nn.Module) -> None:
    """Equal gradients and buffers under equal names."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in pipe.named_parameters():
        assert same(parameter.grad, gradients[name]), name
    buffers = dict(model.named_buffers())
    for name, buffer in pipe.named_buffers():
        assert same(buffer.double(), buffers[name].double()), name
