"""What `compile` is asked for, checked before the work rather than after it."""

from torch import nn

from fxpipe.costs.devices import device_named
from fxpipe.errors import InputError, PlanError
from fxpipe.ir import Capture, CheckpointMode, Profile
from fxpipe.memory import lacks_memory
from fxpipe.ops.interpret import by_mode
from fxpipe.passes.linearize_blocks import blocks_of
from fxpipe.passes.order import NAMES as SCHEDULES
from fxpipe.passes.order import build as build_schedule
from fxpipe.passes.order import given as given_schedule
from fxpipe.passes.order import usual_loops
from fxpipe.passes.partition import SOLVERS
from fxpipe.passes.partition_costs import too_few_blocks
from fxpipe.passes.search.plan import NAME as AUTO
from fxpipe.passes.search.plan import NAMES as SEARCHED
from fxpipe.schedule import Schedule
from fxpipe.show.texts import plural

# Of a table. More of them no one waits for, and no one reads.
_MOST_ACTIONS = 2**24
_MOST_SECONDS = 1e6
_GRAPH = "graph"  # of what a step can be captured as


def check_settings(
    microbatches: object,
    loops: object,
    schedule: str | Schedule,
    checkpoint: str,
    solver: str,
    time_limit_s: float,
    capture: str | None = None,
) -> None:
    """Before the work rather than after it, and all at once."""
    wrong = []
    if not 0 <= time_limit_s <= _MOST_SECONDS:  # nan is neither
        wrong.append(f"the time limit is 0 to {_MOST_SECONDS:.0f} seconds, not {time_limit_s}")
    for what, count in (
        ("microbatches", 1 if microbatches == AUTO else microbatches),
        ("loops", 1 if loops is None else loops),
    ):
        if not isinstance(count, int) or count < 1:
            wrong.append(f"{what} is a whole number, at least 1, not {count!r}")
    modes = (*(mode.value for mode in CheckpointMode), AUTO)
    named = SCHEDULES[0] if isinstance(schedule, Schedule) else str(schedule).partition(":")[0]
    for what, name, names in (
        ("schedule", named, (*SCHEDULES, *SEARCHED)),
        ("checkpoint mode", checkpoint, modes),
        ("solver", solver, SOLVERS),
        ("capture", _GRAPH if capture is None else capture, (_GRAPH,)),
    ):
        if name not in names:
            wrong.append(f"there is no {what} {name!r}: use one of {', '.join(names)}")
    if schedule in SEARCHED and checkpoint not in (CheckpointMode.NEVER, AUTO):
        wrong.append(
            f"the schedule {schedule} recomputes nothing or chooses what: give checkpoint never or "
            f"auto, not {checkpoint}"
        )
    if wrong:
        raise InputError("\n".join(wrong))


def usual_microbatches(n_devices: int, batch: int | None = None) -> int:
    """Twice the devices, at most a row each of the batch; how many there are if none is asked.

    If some had one row and others two, fewer, of two rows at least, as long as there is one for
    each device: a batch norm can't train on one row.
    """
    if batch is None:
        return 2 * n_devices
    most = min(batch, 2 * n_devices)
    mixed = most < batch < 2 * most
    return batch // 2 if mixed and batch // 2 >= n_devices else most


def microbatch_counts(
    microbatches: int | str, n_devices: int, schedule: str | Schedule, profile: Profile | str | None
) -> tuple[int, ...]:
    """The numbers of micro-batches to plan for."""
    if not isinstance(microbatches, str):
        return (microbatches,)
    if isinstance(schedule, Schedule):
        return (schedule.n_microbatches,)
    if isinstance(profile, Profile):
        raise InputError(
            f"the profile is of micro-batches of {profile.batch} rows: with microbatches auto each "
            "number of them is measured, so give no profile, or analytic:h100"
        )
    return n_devices, 2 * n_devices, 4 * n_devices


def table_of(
    schedule: str | Schedule, n_devices: int, microbatches: int, loops: int | None
) -> Schedule | None:
    """The table that is asked for; none if it is searched. Raises InputError if it is too long."""
    n_stages = schedule.n_stages if isinstance(schedule, Schedule) else n_devices * (loops or 1)
    n_actions = 2 * n_stages * microbatches
    if n_actions > _MOST_ACTIONS:
        raise InputError(
            f"{plural(n_stages, 'stage')} in {plural(microbatches, 'micro-batch', 'es')} are "
            f"{n_actions} "
            f"actions; plans have {_MOST_ACTIONS} at most: use fewer devices, loops or "
            "micro-batches"
        )
    if schedule in SEARCHED:
        return None
    if isinstance(schedule, Schedule):
        return given_schedule(schedule, n_devices, microbatches, loops)
    loops = usual_loops(schedule, n_devices) if loops is None else loops
    return build_schedule(schedule, n_devices, microbatches, loops)


def check_costs(model: nn.Module, profile: Profile | str | None) -> None:
    """Raise if there is no way to tell what the model's ops cost."""
    if isinstance(profile, str):
        device_named(profile)  # before the work rather than after it
    elif profile is None and lacks_memory(model):
        raise InputError(
            f"{type(model).__name__} was built without memory, so that nothing can be measured: "
            "compile it with profile='analytic:h100' or another device's"
        )


def check_blocks(capture: Capture, n_stages: int) -> None:
    """Raise PlanError if the model can't be cut into `n_stages`, which costs don't change."""
    n_blocks = len(blocks_of(capture))
    if n_stages > n_blocks:
        raise PlanError(too_few_blocks(n_stages, n_blocks))


def check_profile(profile: Profile, capture: Capture, microbatches: int) -> None:
    """Raise if `profile` is not of this model in as many micro-batches."""
    if profile.fingerprint != capture.fingerprint:
        raise InputError(
            f"the profile is of another model, or of another version of it (fingerprint "
            f"{profile.fingerprint}, this model's is {capture.fingerprint}): measure it anew"
        )
    ops = [node for node in capture.graph.nodes if node.name in capture.ops]
    run = [op.name for op in ops if op.target is not by_mode and capture.mode(op.name) != "eval"]
    missing = [name for name in run if name not in profile.costs]
    if missing:
        raise InputError(f"the profile has no cost of {', '.join(missing[:3])}: measure it anew")
    rows = -(-capture.batch // microbatches)
    if profile.batch != rows:
        raise InputError(
            f"the profile is of micro-batches of {profile.batch} rows, but a batch of "
            f"{capture.batch} in {plural(microbatches, 'micro-batch', 'es')} has {rows}: measure "
            "it anew"
        )
