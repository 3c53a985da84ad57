"""A TrainJob of Kubeflow is told of its job's progress by rank 0, with the token of that moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace import rpc
from headrace.cli.run.trainjob_progress import SERVER_URL, TOKEN, progress_told, trainer_status
from headrace.v1 import jobs_pb2, jobs_pb2_grpc

NOW = datetime(2026, 6, 12, 3, tzinfo=UTC)
RUNNING, DONE = jobs_pb2.JOB_STATE_RUNNING, jobs_pb2.JOB_STATE_DONE


def job_status(committed: int, num_steps: int = 20, state: Any = RUNNING) -> jobs_pb2.JobStatus:
    return jobs_pb2.JobStatus(job="j", state=state, committed_steps=committed, num_steps=num_steps, last_loss=0.25)


def test_the_fields_are_those_of_a_trainjobs_status() -> None:
    assert trainer_status(job_status(9), 4, 10.0, NOW) == {
        "lastUpdatedTime": "2026-06-12T03:00:00+00:00",
        "metrics": [{"name": "committed_steps", "value": "9"}, {"name": "loss", "value": "0.25"}],
        "progressPercentage": 45,
        "estimatedRemainingSeconds": 22,
    }
    assert "progressPercentage" not in trainer_status(job_status(0, 0), 0, 1.0, NOW), "how long the job is, is not known yet"
    assert "estimatedRemainingSeconds" not in trainer_status(job_status(4), 4, 10.0, NOW)
    last = trainer_status(job_status(20), 4, 10.0, NOW)
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (99, 0)
    assert trainer_status(job_status(20, state=DONE), 4, 10.0, NOW)["progressPercentage"] == 100


class Controller(ThreadingHTTPServer):
    """Keeps what it is sent; refuses as long as `refuses`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.refuses = False
        self.news = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Controller

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.heard.append((self.headers["Authorization"], body["trainerStatus"]))
        self.send_response(403 if self.server.refuses else 200)
        self.end_headers()
        self.server.news.set()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def controller() -> Iterator[Controller]:
    with Controller() as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield server
        server.shutdown()
        serving.join()


class Jobs(jobs_pb2_grpc.JobsServicer):
    """A job of 20 steps."""

    def __init__(self) -> None:
        self.status = job_status(5)

    async def Show(self, _: jobs_pb2.ShowRequest, __: grpc.aio.ServicerContext) -> jobs_pb2.JobStatus:  # noqa: N802
        return self.status


async def test_rank_0_tells_at_the_beginning_and_at_the_end(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token, jobs = tmp_path / "token", Jobs()
    token.write_text("first\n")
    monkeypatch.setenv(SERVER_URL, f"http://127.0.0.1:{controller.server_port}/status")
    monkeypatch.setenv(TOKEN, str(token))
    server = rpc.Server("127.0.0.1:0", {rpc.JOBS: lambda s: jobs_pb2_grpc.add_JobsServicer_to_server(jobs, s)})
    await server.start()

    def train(*, rank: str, fails: bool = False) -> None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with progress_told(server.endpoint, "j", every_s=600.0):
            assert rank != "0" or controller.news.wait(60.0)
            token.write_text("second\n")
            jobs.status = job_status(20, state=DONE)
            if fails:
                raise InterruptedError

    try:
        await asyncio.to_thread(train, rank="1")
        assert controller.heard == [], "the others are silent"
        jobs.status = job_status(5)
        token.write_text("first\n")
        await asyncio.to_thread(train, rank="0")
        told = [(said, status["progressPercentage"]) for said, status in controller.heard]
        assert told == [("Bearer first", 25), ("Bearer second", 100)]
        assert not caplog.messages
        controller.refuses = True
        with contextlib.suppress(InterruptedError):
            await asyncio.to_thread(train, rank="0", fails=True)
        (line,) = caplog.messages
        assert line.startswith("progress is not told job=j url=http://127.0.0.1:")
        assert "403" in line
    finally:
        await server.stop(0)


def test_elsewhere_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SERVER_URL, raising=False)
    with progress_told("127.0.0.1:1", "j"):
        assert "progress" not in {thread.name for thread in threading.enumerate()}
