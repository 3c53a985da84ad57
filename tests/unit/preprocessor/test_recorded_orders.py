"""A former release's leader at a preprocessor of today: its recorded orders are answered as they were (tests/histories)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from headrace.preprocessor.sources.cache import ShardCache
from headrace.rpc import Server
from headrace.v1 import fleet_pb2_grpc
from headrace.v1.fleet_pb2 import FleetOrder, FleetOrders, FleetReports
from tests.histories.history import at_hand, histories, read_messages
from tests.histories.newer import with_a_field_more
from tests.unit.preprocessor.engine_world import PATIENCE_S, Orders, Worker

ANSWERS = ("shards_listed", "shard_indexed", "samples_probed", "part_decoded", "order_failed")


def recorded(file: Path) -> tuple[list[FleetOrder], dict[str, list[Any]]]:
    """The orders of a leader, with the paths that data have here, and what was answered to each lease."""
    orders, answers = [], defaultdict(list)
    for said in read_messages(file):
        if said.method.endswith("Fleet/Work") and said.by_client:
            for report in FleetReports.FromString(said.message).reports:
                if (kind := str(report.WhichOneof("report"))) in ANSWERS:
                    answers[getattr(report, kind).lease].append(getattr(report, kind))
        elif said.method.endswith("Fleet/Work"):
            orders += FleetOrders.FromString(said.message).orders
    for order in orders:
        body = getattr(order, str(order.WhichOneof("order")))
        if hasattr(body, "spec_json"):
            body.spec_json = at_hand(body.spec_json)
        for shard in [*getattr(body, "shards", ()), *([body.shard] if hasattr(body, "shard") else ())]:
            shard.url = at_hand(shard.url)
    return orders, answers


def content(report: Any) -> Any:
    """What an answer says, in any order, with the paths that data have here."""
    if hasattr(report, "shards"):
        return [(shard.number, shard.source, shard.name, at_hand(shard.url)) for shard in report.shards], report.vocabulary
    if hasattr(report, "probes"):
        probes = sorted(probe.SerializeToString(deterministic=True) for probe in report.probes)
        return probes, sorted((item.sample_id, item.name, item.reason) for item in report.rejections)
    if hasattr(report, "num_samples"):
        return report.num_samples, sorted((item.name, item.reason) for item in report.rejections)
    return type(report).__name__


@pytest.mark.parametrize("newer", [False, True], ids=["as recorded", "with a field more"])
@pytest.mark.parametrize("folder", histories("preprocessor.jsonl"))
async def test_orders_of_an_old_leader_are_answered_as_they_were(folder: Path, tmp_path: Path, newer: bool) -> None:
    orders, answers = recorded(folder / "preprocessor.jsonl")
    leader = Orders()
    server = Server("127.0.0.1:0", {"headrace.v1.Fleet": lambda s: fleet_pb2_grpc.add_FleetServicer_to_server(leader, s)})
    await server.start()
    worker = Worker(leader, server.endpoint, ShardCache(tmp_path / "cache"), threads=2)
    running = asyncio.create_task(worker.engine.run())
    await leader.heard("hello")
    found: dict[str, list[Any]] = defaultdict(list)
    for order in orders:
        kind = str(order.WhichOneof("order"))
        asked = kind == "job_opened" or getattr(getattr(order, kind), "lease", "") in answers
        if asked:  # a release before its parts are decoded would take them back
            if newer:
                with_a_field_more(order)
            leader.orders.put_nowait(order)
    async with asyncio.timeout(PATIENCE_S):
        while sum(map(len, found.values())) < sum(map(len, answers.values())):
            report = await leader.reports.get()
            body = getattr(report, str(report.WhichOneof("report")))
            found[body.lease].append(body)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await server.stop(0)
    assert {lease: list(map(content, reports)) for lease, reports in found.items()} == {
        lease: list(map(content, reports)) for lease, reports in answers.items()
    }
