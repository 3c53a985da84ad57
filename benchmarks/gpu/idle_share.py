"""How long a device does nothing while something runs, from the profiler's record of what it did."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.target import Target

Intervals = Iterable[tuple[float, float]]


def idle_percent(run: Callable[[], object], target: Target) -> float:
    """Return the percentage of time without a kernel or a copy, from the first one of `run` to the last one.

    On the CPU, operations of torch stand for kernels. The profiler itself makes the host slower: the true share is no larger.
    """
    target.synchronize()
    activity = ProfilerActivity.CUDA if target.is_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        run()
        target.synchronize()
    kind = target.device_type.upper()
    return 100 * idle_share(
        (event.time_range.start, event.time_range.end)
        for event in recorded.events() or ()
        if event.device_type.name == kind and not _is_label(event)
    )


def idle_share(intervals: Intervals) -> float:
    """Return the part of the time from the first start to the last end that no interval covers. Raises ValueError for none."""
    found = sorted(intervals)
    if not found:
        raise ValueError("the profiler saw nothing of the device: is another profiler attached to it?")
    begin, busy, reached = found[0][0], 0.0, found[0][0]
    for start, end in found:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - begin) if reached > begin else 0.0


def _is_label(event: FunctionEvent) -> bool:
    """Whether an event is the span of a name, as the optimizer's step has one, and nothing that the device did."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(("Optimizer.", "ProfilerStep"))
