"""What a step holds for each byte of parameters besides them."""

import pytest
import torch
from torch import nn

from fxpipe.costs.optimizer import OPTIMIZERS, optimizer_of
from fxpipe.errors import InputError


def weights(dtype=torch.float32):
    return list(nn.Linear(4, 4, dtype=dtype).parameters())


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", torch.optim.SGD),
        ("momentum", lambda given: torch.optim.SGD(given, momentum=0.9)),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_torch_holds(name, make, dtype):
    parameters = weights(dtype)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(parameters)
    optimizer.step()
    states = [t for held in optimizer.state.values() for t in held.values() if t is not None]
    bytes_held = sum(t.nbytes for t in states if t.dim()) + sum(p.grad.nbytes for p in parameters)
    own = sum(p.nbytes for p in parameters)
    assert optimizer_of(name).training_factor(parameters) == bytes_held / own


def test_mixed_precision_by_a_file(tmp_path):
    (tmp_path / "mixed.toml").write_text(
        'states = ["float32", "float32"]\nmaster = "float32"\ngradient = "parameter"\n'
    )
    (tmp_path / "mixed.json").write_text('{"states": ["float32", "float32"], "master": "float32"}')
    toml, json = (optimizer_of(str(tmp_path / f"mixed.{kind}")) for kind in ("toml", "json"))
    assert toml == json
    assert toml.training_factor(weights(torch.bfloat16)) == (2 + 4 + 4 + 4) / 2
    assert str(toml) == "mixed: gradients, 2 states in float32, master copies in float32"


def test_frozen_parameters_have_neither():
    layer = nn.Linear(4, 4).requires_grad_(False)
    mixed = [*layer.parameters(), *weights(torch.bfloat16)]
    assert optimizer_of("adam").training_factor(mixed) == 3
    assert optimizer_of("adam").training_factor(layer.parameters()) == 3


def test_they_say_what_they_are():
    assert [str(one) for one in OPTIMIZERS.values()] == [
        "sgd: gradients only",
        "momentum: gradients, 1 state",
        "adam: gradients, 2 states",
        "adamw: gradients, 2 states",
    ]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("rmsprop", None, "no optimizer 'rmsprop': use one of sgd, momentum, adam, adamw, or a"),
        ("a.json", None, r"a\.json can't be read"),
        ("a.json", "{", r"a\.json describes no optimizer"),
        ("a.json", "{}", "`states` is a list"),
        ("a.json", '{"states": ["float33"]}', "'float33' is no dtype"),
        ("a.toml", 'states = []\nstate = "float32"', "'state' is not known"),
    ],
)
def test_what_is_none_is_told(name, text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=says):
        optimizer_of(name)
