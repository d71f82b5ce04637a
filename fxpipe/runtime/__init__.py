"""Executes a package: in one process with a lane per device, or in a process per device."""

from fxpipe.runtime.package import load
from fxpipe.runtime.pipeline import Pipeline
from fxpipe.runtime.runner import Runner
from fxpipe.runtime.splicing import splice
from fxpipe.runtime.stream import Devices

__all__ = ["Devices", "Pipeline", "Runner", "load", "splice"]
