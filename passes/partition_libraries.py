"""What devices hold besides for libraries, such as cuBLAS's workspaces, throughout a step."""

from dataclasses import replace

from fxpipe.ir import Plan


def with_libraries_held(plan: Plan, library_bytes: int) -> Plan:
    """The plan whose peaks, and memory over time, count so many bytes more on each device."""
    estimate = plan.estimate
    memory = tuple(
        tuple((ms, n_bytes + library_bytes) for ms, n_bytes in held) for held in estimate.memory
    )
    peaks = tuple(peak + library_bytes for peak in estimate.peak_bytes)
    together = estimate.together_bytes
    if together is not None:
        together += library_bytes * len(peaks)
    return replace(
        plan,
        estimate=replace(estimate, peak_bytes=peaks, memory=memory, together_bytes=together),
    )
