"""What a reorder service tells of itself, judged: release, clocks, store, preprocessors. Pure: its answer in, diagnoses out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headrace.cli.doctor.diagnosis import Diagnosis, fault, ok, warning
from headrace.v1.jobs_pb2 import PreprocessorStatus, ServiceStatus

CLOCK_TOLERANCE_S = 5.0  # two logs can still be read side by side, and a busy service takes a moment to hear a preprocessor
MAX_NAMED = 3  # preprocessors that a sentence names
_UPGRADE = "run one release everywhere (docs/upgrading.md says in which order to upgrade)"
_KEEP = "have a time service (chrony, systemd-timesyncd) keep both: certificates and logs go by them"


def releases(status: ServiceStatus, own_release: str) -> Iterator[Diagnosis]:
    """Tell whether the service and its preprocessors are of this process's release."""
    leads = f"{status.leader} leads in term {status.term}, for {_span(status.up_s)}"
    if status.release != own_release:
        yield warning("release", f"{leads}; it is of release {status.release}, and this one is of {own_release}", _UPGRADE)
    else:
        yield ok("release", f"{leads}; {status.release}, protocol {status.protocol}, as here")
    if others := [one for one in status.preprocessors if one.release not in ("", status.release)]:
        named = _named(others, lambda one: one.release)
        yield warning("release of preprocessors", f"other than the service's {status.release}: {named}", _UPGRADE)


def of_an_older_release() -> Diagnosis:
    """Return what there is to say of a service that tells nothing of itself."""
    return warning("release", "the service is of an older release, which tells nothing of itself", _UPGRADE)


def clocks(status: ServiceStatus, asked_s: float, answered_s: float) -> Iterator[Diagnosis]:
    """Tell whether clocks differ. `asked_s`, `answered_s`: when the service was asked and answered, by this machine's clock."""
    ahead_s = status.clock_s - (asked_s + answered_s) / 2
    if abs(ahead_s) > CLOCK_TOLERANCE_S + (answered_s - asked_s) / 2:
        yield warning("clocks", f"the service's is {_ahead(ahead_s)} this machine's", _KEEP)
    else:
        yield ok("clocks", f"the service's agrees with this machine's within {max(0.1, abs(ahead_s)):.1f} s")
    if off := [one for one in status.preprocessors if abs(one.clock_ahead_s) > CLOCK_TOLERANCE_S]:
        named = _named(off, lambda one: f"{_ahead(one.clock_ahead_s)} it")
        yield warning("clocks of preprocessors", f"differ from the service's: {named}", _KEEP)


def store(status: ServiceStatus) -> Iterator[Diagnosis]:
    """Tell whether the store keeps every commit."""
    kind = "embedded, on the service's machine" if status.embedded_store else "Redis"
    if status.forgetful:
        settings = ", ".join(f"{one.name} {one.value}" for one in status.forgetful)
        wanted = " ".join(f"--{one.name} {one.wanted}" for one in status.forgetful)
        forgets = f"{kind}, which may forget commits ({settings}): trainers would go back to their checkpoints"
        yield warning("store", forgets, f"start Redis with {wanted}")
    elif not status.store_tells:
        yield ok(
            "store",
            f"{kind}, which does not tell its settings",
            "ask who runs it for appendonly, appendfsync always and noeviction",
        )
    else:
        yield ok("store", f"{kind}; every commit is on its disk before it counts")


def preprocessors(status: ServiceStatus, endpoint: str, *, needed: bool) -> Iterator[Diagnosis]:
    """Tell whether preprocessors are connected. `needed`: whether a job waits for them."""
    members = status.preprocessors
    start = f"start one with `headrace preprocessor --endpoint {endpoint}`"
    if not members:
        if needed:
            yield fault("preprocessors", "none is connected, and jobs wait for one", start)
        else:
            yield warning("preprocessors", "none is connected", start)
        return
    if silent := [one for one in members if one.silent]:
        hang = "see their logs: they hang, or cannot read their data"
        yield warning(
            "preprocessors", f"have had work for long without a report: {_named(silent, lambda one: one.endpoint)}", hang
        )
    budget_mib = sum(one.store_budget_bytes for one in members) >> 20
    yield ok(
        "preprocessors",
        f"{len(members)} connected, with {sum(one.slots for one in members)} slots and {budget_mib:,} MiB of stores",
    )


def _named(members: Sequence[PreprocessorStatus], what: Callable[[PreprocessorStatus], str]) -> str:
    first = ", ".join(f"{one.preprocessor} ({what(one)})" for one in members[:MAX_NAMED])
    return first + (f" and {len(members) - MAX_NAMED} more" if len(members) > MAX_NAMED else "")


def _ahead(seconds: float) -> str:
    return f"{_span(abs(seconds))} {'ahead of' if seconds > 0 else 'behind'}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
