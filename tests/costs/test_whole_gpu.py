"""Parts of a GPU are measured while all are at it, told by stand-ins: there may be no GPU here."""

from contextlib import nullcontext

from fxpipe.costs import whole_gpu


class Part:
    """A device, its stream and its twin in one, which take down what is asked of them."""

    def __init__(self, name, seen):
        self.name, self._seen = name, seen

    def notes(self, what):
        self._seen.append(f"{what} {self.name}")


def test_all_parts_are_held_up_until_all_is_launched(monkeypatch):
    """To wait for one that is held up would let the others begin one by one."""
    seen = []
    parts = [Part(name, seen) for name in "ab"]
    monkeypatch.setattr(whole_gpu, "current_stream", lambda part: part)
    monkeypatch.setattr(whole_gpu, "use_streams", lambda streams: nullcontext())
    monkeypatch.setattr(whole_gpu, "synchronize", lambda part: part.notes("wait for"))
    monkeypatch.setattr(whole_gpu, "hold_up", lambda part, ms: part.notes("hold up"))
    monkeypatch.setattr(whole_gpu, "mark", lambda part: part.notes("mark"))
    monkeypatch.setattr(whole_gpu, "ms_between", lambda start, end: 2.0)
    found = whole_gpu._Parts(parts, parts)._ms("forward", lambda part: part.notes("launch on"))
    assert found == 2.0
    assert seen == [
        *("wait for a", "wait for b", "hold up a", "hold up b"),
        *("mark a", "launch on a", "mark a", "mark b", "launch on b", "mark b"),
        *("wait for a", "wait for b"),
    ]
