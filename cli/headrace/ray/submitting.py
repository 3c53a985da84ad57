"""Submit a job and have a Ray cluster run its preprocessors: `headrace preprocessor --engine ray` as a child of this process."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from headrace.cluster_token import TOKEN
from headrace.errors import HeadraceError, UserError
from headrace.jobs import DEFAULT_ENDPOINT, Jobs, JobStatus
from headrace.jobs_client import JobsClient
from headrace.processes import Process
from headrace.spec import JobSpec, load_spec_yaml, parse_spec

START_S = 600.0  # that the first preprocessor may take: Ray may have to start a node for it
STOP_S = 30.0
POLL_S = 0.2
USER_ERROR = 2  # exit code of a command that its user can put right


class RayRun:
    """A submitted job, and the preprocessors of its service on a Ray cluster. Use it in a `with` block, or call `stop`."""

    def __init__(self, status: JobStatus, driver: Process) -> None:
        """`driver`: of the preprocessors, which is ended by `stop`."""
        self.status = status
        """The job when its first preprocessor was there; `headrace.jobs.Jobs` tells how it goes on."""
        self._driver = driver

    @property
    def job(self) -> str:
        """The job's name."""
        return self.status.job

    @property
    def log(self) -> Path:
        """What the driver decides and does, and what the preprocessors write."""
        return self._driver.log

    def check(self) -> None:
        """Raise HeadraceError where the driver has ended, and the preprocessors with it."""
        _check(self._driver)

    def stop(self) -> None:
        """End the preprocessors in order, and the driver. The job stays, for other preprocessors or another `submit`."""
        self._driver.terminate()
        self._driver.wait(STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()


def submit(
    spec: JobSpec | Mapping[str, Any] | str | Path,
    *,
    endpoint: str = DEFAULT_ENDPOINT,
    address: str | None = None,
    min: int = 1,
    max: int = 8,
    cpus: float | None = None,
    options: Sequence[str] = (),
    token: str | None = None,
    log: Path | None = None,
) -> RayRun:
    """Start a job, keep between `min` and `max` preprocessors for its service on a Ray cluster, and return when one has joined.

    spec: a job's spec, its fields, or its YAML file; the same one again resumes a job that had failed. endpoint: of the reorder
    service, an address that the nodes of the cluster reach. address: HOST:PORT of the cluster; None: the one that this process
    is attached to, or $RAY_ADDRESS, or the one of this machine. cpus: that Ray sets aside for each preprocessor, which has as
    many threads; None: 1. options: further ones of `headrace preprocessor`, such as ("--data-root", "/data"). token: the
    service's token, which is handed over by its value: whoever reaches the head of the Ray cluster can read it, unless that asks
    for a token of its own; None: the environment's, which HEADRACE_CLUSTER_TOKEN_FILE names without showing it. With roles it
    stands in the files `preprocess` and `submit`. log: of the driver; None: a new file, which `RayRun.log` names.

    One call for a service is enough: all of its jobs have the same preprocessors. The driver is a child of this process, and ends
    with it, on Linux with the thread that called this.

    Raises SpecError for an invalid spec, UserError for what `headrace preprocessor --engine ray` refuses, EndpointError where no
    cluster or no service answers, HeadraceError where no preprocessor joins within ten minutes.
    """
    if isinstance(spec, str | Path):
        spec = load_spec_yaml(Path(spec))
    elif not isinstance(spec, JobSpec):
        spec = parse_spec(dict(spec))
    arguments = ["preprocessor", "--engine", "ray", "--endpoint", endpoint, "--min", str(min), "--max", str(max), *options]
    if known := address or _attached_to():
        arguments += ["--address", known]
    if cpus is not None:
        arguments += ["--ray-cpus", str(cpus)]
    log = log or Path(tempfile.mkdtemp(prefix="headrace-ray-")) / "driver.log"
    driver = Process("driver of the preprocessors on Ray", arguments, log, {} if token is None else {TOKEN: token})
    try:
        _await_attached(driver)
        with Jobs(endpoint, token=token) as jobs:
            job = jobs.submit(spec).job
            if min:
                _await_joined(driver, endpoint, token, job)
            return RayRun(jobs.show(job), driver)
    except BaseException:
        driver.terminate()
        driver.wait(STOP_S)
        raise


def _attached_to() -> str:
    """Return the address of the cluster that this process is attached to; empty: none."""
    ray = sys.modules.get("ray")
    return str(ray.get_runtime_context().gcs_address) if ray is not None and ray.is_initialized() else ""


def _await_attached(driver: Process) -> None:
    """Wait until the driver has checked its options and found the cluster and the service."""
    deadline_s = time.monotonic() + START_S
    while b" attached " not in driver.log.read_bytes():
        _pause(driver, deadline_s)


def _await_joined(driver: Process, endpoint: str, token: str | None, job: str) -> None:
    """Wait until a job has a preprocessor, unless it is over."""
    deadline_s = time.monotonic() + START_S
    with JobsClient(endpoint, token) as client:
        while not (status := client.show(job)).preprocessors and not JobStatus.of(status).is_over:
            _pause(driver, deadline_s)


def _pause(driver: Process, deadline_s: float) -> None:
    """Let a moment pass. Raises HeadraceError where nothing is to be waited for any more."""
    _check(driver)
    if time.monotonic() > deadline_s:
        raise HeadraceError(f"no preprocessor on Ray has joined within {START_S:.0f} s: {driver.last_words()}")
    time.sleep(POLL_S)


def _check(driver: Process) -> None:
    code = driver.exit_code()
    if code is None:
        return
    sentence = f"the {driver.name} has ended: {driver.last_words()}"
    raise UserError(sentence) if code == USER_ERROR else HeadraceError(sentence)
