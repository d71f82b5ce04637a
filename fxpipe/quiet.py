"""Torch's log, while what fails is told by us."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_TALKATIVE = (  # print their own account of what we raise, or, before torch 2.13, of our settings
    "torch._dynamo.metrics_context",
    "torch._guards",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
)


@contextmanager
def quiet() -> Iterator[None]:
    """Meanwhile torch writes nothing of what fails under tracing, or on fake tensors."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
