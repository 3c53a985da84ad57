"""What rank 0 of `headrace train` tells Kubeflow Trainer of a job's progress, for the status of the TrainJob that it runs in.

Kubeflow Trainer 2.2 and later, with its feature `TrainJobStatus`, names in the environment of a TrainJob's pods where to send
that, by what certificate that server is known, and a file with a token, which changes. Elsewhere nobody is told anything.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.jobs_client import JobsClient, state_name
from headrace.launcher_variables import rank
from headrace.observability.logs import pairs
from headrace.v1.jobs_pb2 import JobStatus

log = logging.getLogger(__name__)

SERVER_URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
EVERY_S = 15.0  # Kubeflow asks for 5 s at least
TIMEOUT_S = 5.0


def trainer_status(status: JobStatus, committed_before: int, passed_s: float, now: datetime) -> dict[str, Any]:
    """Return the fields of a TrainJob's `status.trainerStatus`.

    `committed_before`: steps that were committed `passed_s` seconds before, from which the remaining seconds are estimated. Only
    a job that is done has 100 percent.
    """
    told: dict[str, Any] = {"lastUpdatedTime": now.isoformat()}
    metrics = {"committed_steps": str(status.committed_steps)}
    if status.committed_steps:
        metrics["loss"] = f"{status.last_loss:.6g}"
    told["metrics"] = [{"name": name, "value": value} for name, value in metrics.items()]
    if status.num_steps:
        is_done = state_name(status) == "done"
        told["progressPercentage"] = 100 if is_done else min(99, 100 * status.committed_steps // status.num_steps)
        if (steps := status.committed_steps - committed_before) > 0:
            left = 0 if is_done else status.num_steps - status.committed_steps
            told["estimatedRemainingSeconds"] = math.ceil(left * passed_s / steps)
    return told


@contextlib.contextmanager
def progress_told(endpoint: str, job: str, every_s: float = EVERY_S) -> Iterator[None]:
    """Tell of the job's progress during the block and at its end, if this is rank 0 of a TrainJob that asks for it.

    `endpoint`: of the reorder service. What goes wrong is logged, and training goes on.
    """
    if not os.environ.get(SERVER_URL) or rank() != 0:
        yield
        return
    over, teller = threading.Event(), _Teller(endpoint, job)
    telling = threading.Thread(target=teller.tell_until, args=(over, every_s), name="progress", daemon=True)
    telling.start()
    try:
        yield
    finally:
        over.set()
        telling.join(4 * TIMEOUT_S)
    teller.tell_the_end()


class _Teller:
    def __init__(self, endpoint: str, job: str) -> None:
        self._endpoint, self._job = endpoint, job
        self._begin_s = time.monotonic()
        self._committed_before: int | None = None
        self._problem = ""

    def tell_until(self, over: threading.Event, every_s: float) -> None:
        self._tell()
        while not over.wait(every_s):
            self._tell()

    def tell_the_end(self) -> None:
        """Tell that the job is done, once the other ranks have committed the last step as well."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self._tell() not in ("done", "") and time.monotonic() < deadline_s:
            time.sleep(0.2)

    def _tell(self) -> str:
        """Tell how the job is, and return its state; empty where that went wrong."""
        try:
            with JobsClient(self._endpoint) as client:
                status = client.show(self._job)
            if self._committed_before is None:
                self._committed_before = status.committed_steps
            passed_s = time.monotonic() - self._begin_s
            _send(trainer_status(status, self._committed_before, passed_s, datetime.now(UTC)))
        except (OSError, HeadraceError) as err:  # HTTPError is an OSError
            if str(err) != self._problem:
                log.warning("progress is not told %s", pairs(job=self._job, url=os.environ[SERVER_URL], error=err))
            self._problem = str(err)
            return ""
        return state_name(status)


def _send(status: dict[str, Any]) -> None:
    """Send a status. Raises OSError where that fails."""
    headers = {"Content-Type": "application/json"}
    if file := os.environ.get(TOKEN):
        headers["Authorization"] = f"Bearer {Path(file).read_text(encoding='utf-8').strip()}"
    body = json.dumps({"trainerStatus": status}).encode()
    request = urllib.request.Request(os.environ[SERVER_URL], data=body, headers=headers, method="POST")
    context = ssl.create_default_context(cafile=os.environ.get(CA_CERT) or None)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context):
        pass
