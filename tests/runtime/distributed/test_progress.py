"""Where a rank says that it is."""

from fxpipe.runtime.distributed.progress import Progress
from fxpipe.schedule import Action, Kind

ROW = tuple(Action(2, Kind.FORWARD, i) for i in range(3))


def test_a_rank_is_at_an_action_unless_it_waits_for_what_that_needs():
    progress = Progress()
    progress.begin("step")
    with progress.running(ROW, lambda: None):
        progress.item = 2
        assert str(progress) == "is in step 1 at 2F2, did 2F0, 2F1 last"
        # As where the rank that sends it is lost: the action was begun, and takes nothing.
        progress.wait_for("1F2")
        assert str(progress) == "is in step 1, did 2F0, 2F1 last, waits for 1F2"
