"""The command as its user runs it, on a small model."""

from typer.testing import CliRunner, Result

from fxpipe.cli import app

MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        y = F.relu(self.norm(self.first(x)))
        z = F.relu(self.second(y))
        return self.last(y + z)


def build():
    print("the model speaks")
    return Net()


def inputs(batch):
    return (torch.randn(batch, 4),)
"""


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def refused(*args: object) -> str:
    """The message of a command that must refuse: one message, exit code 2, no traceback."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    message = result.stderr[result.stderr.index("error: ") :]
    assert message.count("error: ") == 1
    return message
