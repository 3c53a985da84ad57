"""What this machine, or container, gives to Headrace: shared memory, files, processors, memory, a cache folder, a clock.

Limits and folders are parameters, by default those of this process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.cli.doctor.diagnosis import Diagnosis, fault, ok, warning
from headrace.cli.run.memory import usable_memory
from headrace.cli.run.preprocessor import DEFAULT_BUDGET_MIB
from headrace.cli.run.processors import usable_processors

SHARED_MEMORY = Path("/dev/shm")
LEAST_FILES = 1024  # what Linux gives by default; a rank of a large job, or a reorder service, takes some hundreds
LEAST_MEMORY_MIB = 2048  # the default budget, as much again for decoding, and a process with torch
MADE_S = 1_767_225_600.0  # 2026: no certificate of Headrace's is older
_TIME_ERROR = 5  # what adjtimex returns of a clock that nobody keeps
_TIMEX_BYTES = 512  # more than struct timex has on any architecture


def shared_memory(folder: Path = SHARED_MEMORY, budget_mib: int = DEFAULT_BUDGET_MIB) -> Iterator[Diagnosis]:
    """Tell whether shared memory can be written, and has room for a preprocessor's default budget."""
    check, without = str(folder), "payload between processes of this machine goes through the network stack instead"
    if not folder.is_dir():
        yield warning(check, f"there is none; {without}", f"mount a tmpfs at {folder}")
        return
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="headrace-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, 4096)
    except OSError as err:
        give = f"make room in {folder} and let this user write to it (in a container: --shm-size, and no read-only mount there)"
        yield fault(check, f"cannot be written ({err.strerror}); {without}", give)
        return
    yield room(check, os.statvfs(folder), budget_mib)


def room(check: str, status: os.statvfs_result, budget_mib: int) -> Diagnosis:
    """Return whether a file system has room for a preprocessor's budget."""
    free_mib, size_mib = (count * status.f_frsize >> 20 for count in (status.f_bavail, status.f_blocks))
    if free_mib < budget_mib:
        return warning(
            check,
            f"{free_mib} of {size_mib} MiB are free, fewer than the {budget_mib} that a preprocessor takes by default",
            f"give it more (in a container --shm-size 1g), or start preprocessors with --budget-mib {max(1, free_mib // 2)}",
        )
    return ok(check, f"{free_mib} of {size_mib} MiB are free")


def open_files(limits: tuple[int, int] | None = None) -> Iterator[Diagnosis]:
    """Tell whether a process may open enough files. `limits`: the soft and the hard one; None: this process's."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= LEAST_FILES
    may_raise = hard == resource.RLIM_INFINITY or hard >= LEAST_FILES
    found = f"{_files(soft)} at a time" + ("" if hard == soft else f", {_files(hard)} where a process raises its limit")
    if enough:
        yield ok("open files", found)
    elif may_raise:
        remedy = f"`ulimit -n {LEAST_FILES}` before the reorder service and trainers; preprocessors raise it themselves"
        yield warning("open files", found, remedy)
    else:
        remedy = f"allow {LEAST_FILES} or more: LimitNOFILE= of the service, --ulimit nofile= of the container, or limits.conf"
        yield fault("open files", found, remedy)


def _files(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def processors(usable: int | None = None, environment: Mapping[str, str] = os.environ) -> Iterator[Diagnosis]:
    """Tell how many processors may be used, and whether libraries are told to start more threads. `usable`: None: found out."""
    usable = usable or usable_processors()
    machine = os.cpu_count() or usable
    found = f"{usable} may be used" + (f" of {machine}" if machine > usable else "")
    told = {name: environment[name] for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS") if name in environment}
    for name, value in told.items():
        if not value.isdecimal() or int(value) < 1:
            yield warning("processors", f"{name}={value!r} is no number of threads", f"unset {name}")
            return
    if too_many := {name: value for name, value in told.items() if int(value) > usable}:
        said = " and ".join(f"{name}={value}" for name, value in too_many.items())
        yield warning("processors", f"{found}, and {said} asks for more threads", f"unset {' and '.join(too_many)}")
    else:
        threads = int(told.get("OMP_NUM_THREADS", usable))
        yield ok("processors", f"{found}; {threads} thread{'' if threads == 1 else 's'} for numerical libraries")


def memory(usable_bytes: int | None = None) -> Iterator[Diagnosis]:
    """Tell how much memory may be used, by the machine and its control groups. `usable_bytes`: None: found out."""
    mib = (usable_memory() if usable_bytes is None else usable_bytes) >> 20
    if mib < LEAST_MEMORY_MIB:
        yield warning(
            "memory",
            f"{mib} MiB may be used, by the machine and its control groups",
            f"allow {LEAST_MEMORY_MIB} MiB or more, or start preprocessors with --budget-mib {max(1, mib // 8)} "
            f"--decode-mib {max(1, mib // 8)} --threads 1",
        )
    else:
        yield ok("memory", f"{mib / 1024:.1f} GiB may be used")


def kernel_cache(package: Path | None = None, environment: Mapping[str, str] = os.environ) -> Iterator[Diagnosis]:
    """Tell where the planner's machine code is kept, if anywhere. `package`: the folder of its sources; None: found out."""
    import headrace.reorder_service

    sources = package or Path(headrace.reorder_service.__path__[0])
    named = environment.get("NUMBA_CACHE_DIR", "")
    home = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/nonexistent"), ".cache"), "numba")
    places = ([Path(named)] if named else []) + [sources, home]  # in the order in which numba tries them
    place = next(filter(_may_write, places), None)
    if place is None:
        compiled = "machine code can be kept nowhere, and the planner is compiled at every start, in a minute or two"
        yield warning("planner", compiled, "name a folder that can be written to in NUMBA_CACHE_DIR")
    elif next(place.rglob("*.nbi"), None) is None:
        yield ok("planner", f"its machine code will be kept in {place}: the first start compiles it, in a minute or two")
    else:
        yield ok("planner", f"its machine code is in {place}")


def _may_write(folder: Path) -> bool:
    """Whether files can be made in a folder, or in the one above it in which it would be made."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=there, prefix="headrace-doctor-"):
            return True
    except OSError:
        return False


def clock(now_s: float | None = None, state: int | None = None) -> Iterator[Diagnosis]:
    """Tell whether the clock is kept. `now_s`: seconds since 1970; `state`: what the kernel says of it. None: found out."""
    now_s = time.time() if now_s is None else now_s
    state = _clock_state() if state is None else state
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if now_s < MADE_S:
        yield fault("clock", f"it says {found}, when no certificate was valid yet", "set it, and have a time service keep it")
    elif state == _TIME_ERROR:
        keep = "run chrony or systemd-timesyncd (for a container: on its host) where certificates or several machines are used"
        yield warning("clock", f"{found}; no time service keeps it", keep)
    else:
        yield ok("clock", found + ("" if state < 0 else ", kept by a time service"))


def _clock_state() -> int:
    """Return what the kernel says of its clock; -1 if it does not say."""
    try:
        return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    except AttributeError:  # not Linux
        return -1
