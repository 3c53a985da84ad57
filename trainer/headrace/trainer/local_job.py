"""`headrace.trainer.local`: a job with services of its own on this machine, for a first try, a notebook or a test."""

from __future__ import annotations

import logging
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.errors import HeadraceError, UserError
from headrace.jobs import Jobs
from headrace.local_services import LocalServices
from headrace.processes import ProcessGroup
from headrace.spec import JobSpec, load_spec_yaml, parse_spec
from headrace.spec_file import is_spec_file
from headrace.trainer.loading.connecting import connect
from headrace.trainer.loading.step_loader import StepLoader

log = logging.getLogger(__name__)

JOB = "local"
LOOK_S = 0.5
_LAST_LINES = 8  # of a log, in the error of a service that does not start


def local(
    what: JobSpec | Mapping[str, Any] | str | Path,
    *,
    preprocessors: int = 1,
    threads: int | None = None,
    logs: str | Path | None = None,
    **fields: Any,
) -> LocalJob:
    """Start the services on this machine, submit a job to them, and return it. They end with it, and with this process.

        with headrace.trainer.local("/data/films", global_batch=16, steps=20) as job, job.connect() as loader:
            for step in loader:
                ...

    `what`: a data set (folder, file, glob or URL), which is read as `headrace demo PATH` reads it; or a job: its spec, its fields
    or its YAML file. `fields`: of the job's spec, beside or in place of those that it has.

    `threads`: of each preprocessor; None: as many as this process may use processors. `logs`: folder for the logs of the
    services; None: a temporary one. The state store is a temporary folder: nothing of the job is left behind.

    In a notebook it may be used without `with`: call `close` at the end. Raises SpecError for an invalid spec, and HeadraceError,
    with the last lines of its log, for a service that does not start.
    """
    if preprocessors < 1:
        raise UserError(f"preprocessors={preprocessors}: there must be at least 1")
    spec = _spec(what, fields)
    stack = ExitStack()
    try:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-local-", ignore_cleanup_errors=True)))
        logs = folder if logs is None else Path(logs)
        logs.mkdir(parents=True, exist_ok=True)
        group = stack.enter_context(ProcessGroup(sigterm_interrupts=False))
        services = _started(group, preprocessors=preprocessors, threads=threads, logs=logs, store=folder / "store")
        with Jobs(services.endpoint) as jobs:
            job = jobs.submit(spec).job
        return LocalJob(services, job, stack)
    except BaseException:
        stack.close()
        raise


class LocalJob:
    """A job with services of its own, which end with `close`, at the end of a `with` block, or with this process."""

    def __init__(self, services: LocalServices, job: str, stack: ExitStack) -> None:
        self.endpoint = services.endpoint
        """Address of the reorder service, for `headrace top` and `headrace.jobs.Jobs`."""
        self.job = job
        """Name of the job."""
        self.pids = services.pids
        """Process ids of the reorder service, and then of the preprocessors."""
        self._over = threading.Event()
        threading.Thread(target=_look_after, args=(services, self._over), name="services", daemon=True).start()
        stack.callback(self._over.set)
        self._end = weakref.finalize(self, stack.close)  # called at the end of the interpreter as well

    def connect(self, **options: Any) -> StepLoader:
        """Return a loader of the job; `options`: those of `headrace.trainer.connect` behind `job`."""
        return connect(self.endpoint, job=self.job, **options)

    def close(self) -> None:
        """End the services. Loaders of the job must be closed before."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _spec(what: JobSpec | Mapping[str, Any] | str | Path, fields: Mapping[str, Any]) -> JobSpec:
    if isinstance(what, str | Path) and is_spec_file(str(what)):
        what = load_spec_yaml(Path(what))
    if isinstance(what, JobSpec):
        return parse_spec({**what.model_dump(exclude_unset=True), **fields})
    if isinstance(what, Mapping):
        return parse_spec({"name": JOB, **what, **fields})
    path = str(Path(what).resolve()) if Path(what).exists() else str(what)
    return parse_spec({"name": JOB, "sources": [{"path": path}], **fields})


def _started(group: ProcessGroup, **options: Any) -> LocalServices:
    """Start the services, and wait until all of them listen. Raises HeadraceError, with the last lines of its log, for one that
    does not."""
    try:
        services = LocalServices.start(group, **options)
        services.await_preprocessors()
    except HeadraceError as err:
        ended = (process for process in group.processes if process.exit_code() is not None)
        before = [line for process in ended for line in process.last_lines(_LAST_LINES)[:-1]]  # `err` has the last one
        raise HeadraceError("\n  ".join([str(err), *before])) from err
    return services


def _look_after(services: LocalServices, over: threading.Event) -> None:
    """Restart preprocessors that have ended, until that is over. Children that a thread has started end with it."""
    while not over.wait(LOOK_S):
        try:
            services.look_after(log.warning)
        except HeadraceError as err:
            log.error("%s", err)
            return
