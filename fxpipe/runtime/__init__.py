"""Executes a package: one process, a lane per device."""

from fxpipe.runtime.package import load
from fxpipe.runtime.pipeline import Pipeline

__all__ = ["Pipeline", "load"]
