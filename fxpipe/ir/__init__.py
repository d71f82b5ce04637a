"""The types between the passes. Each pass is a function from earlier ones of these to one more.

    target -> Capture -> Profile -> Chain -> Plan -> Wiring -> Package

All are frozen. A value is named after the graph node that computes it, an op likewise; bytes and
milliseconds are those of one micro-batch unless a name says otherwise.
"""

from fxpipe.ir.capture import Capture, Input, Op, SourceLine, own_storage
from fxpipe.ir.chain import Block, Chain, Value
from fxpipe.ir.costs import Launch, Link, LossCost, Network, OpCost, Profile
from fxpipe.ir.plan import GIVEN, CheckpointMode, Estimate, Plan, StageEstimate, Wait
from fxpipe.ir.wiring import PackageFiles, Port, StageWiring, Wiring

__all__ = [
    "GIVEN",
    "Block",
    "Capture",
    "Chain",
    "CheckpointMode",
    "Estimate",
    "Input",
    "Launch",
    "Link",
    "LossCost",
    "Network",
    "Op",
    "OpCost",
    "PackageFiles",
    "Plan",
    "Port",
    "Profile",
    "SourceLine",
    "StageEstimate",
    "StageWiring",
    "Value",
    "Wait",
    "Wiring",
    "own_storage",
]
