"""Searches of little work."""

import pytest

from fxpipe.passes.search import climbs


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the limit in seconds, a guard that hangs on the machine, is never met."""
    monkeypatch.setattr(climbs, "_WORK_PER_SECOND", 4000)
