"""How many jobs that have not ended a service takes."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import pytest

from headrace.errors import LimitError
from headrace.reorder_service.service import ReorderService
from headrace.reorder_service.store.state import StateStore
from headrace.spec import parse_spec
from headrace.v1 import jobs_pb2
from tests.unit.reorder_service.api.leader_world import Leader
from tests.unit.reorder_service.job_world import end, submit


async def test_no_more_jobs_are_begun_than_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = ReorderService(await StateStore.open(f"embedded:{tmp_path / 'store'}"), max_jobs=2)
    await service.store.database.lead("test")
    await service.start()
    leader = Leader(service)
    await leader.server.start()
    try:
        for name in ("a", "b", "a"):
            await submit(service, name=name, join=False)
        with pytest.raises(LimitError, match=r"^2 jobs have not ended, .*headrace job cancel NAME.* --max-jobs"):
            await submit(service, name="c", join=False)
        assert await service.store.jobs() == ["a", "b"]

        spec = parse_spec({"name": "c", "sources": [{"path": "/d"}], "global_batch": 4}).to_json()
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await leader.submit(jobs_pb2.SubmitRequest(spec_json=spec).SerializeToString())
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        (line, *_) = [line for line in lines if 'reason="too many jobs"' in line]
        assert "method=/headrace.v1.Jobs/Submit peer=ipv4:127.0.0.1:" in line
        assert await service.store.jobs() == ["a", "b"]

        await service.cancel_with_evaluations("a")
        await submit(service, name="c", join=False)
        await submit(service, name="a", join=False)  # which has ended, and stays as it is
        with pytest.raises(LimitError):
            await submit(service, name="d", join=False)
    finally:
        await leader.server.stop(0)
        await end(service)
