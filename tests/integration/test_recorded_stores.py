"""Stores that releases have left (tests/histories): a leader of today takes every job up and continues it to the recorded end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis

from headrace.jobs_client import state_name
from headrace.reorder_service.store.redis_database import FORMAT
from headrace.topology_spec import load_topology_json
from tests.histories.history import histories, restore_store
from tests.histories.record import JOBS, MESSAGES, finish, record

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.parametrize("folder", histories("store.json"))
def test_a_leader_of_today_continues_every_recorded_job_to_the_same_ledger(cluster, store, folder: Path) -> None:
    with redis.Redis.from_url(store.url, decode_responses=True) as client:
        restore_store(client, folder / "store.json")
        jobs = client.lrange("headrace:jobs", 0, -1)
        recorded = {job: client.hgetall(f"headrace:{{{job}}}:job") for job in jobs}
    cluster.start_reorder(store=store.url)
    with cluster.client() as client:
        for status in map(client.show, jobs):
            fields = recorded[status.job]
            state = "paused" if fields["paused"] == "1" else fields["state"].lower()
            assert (state_name(status), status.message) == (state, fields["message"])
            assert (status.committed_steps, status.generation) == (int(fields["cursor"]), int(fields["generation"]))
            if fields["topology"]:
                assert load_topology_json(status.topology_json) == load_topology_json(fields["topology"])
    cluster.add_preprocessors(1)
    ends = json.loads((folder / "ends.json").read_text())
    assert finish(cluster, jobs) == {job: ends[job] for job in jobs}


@pytest.mark.slow
def test_a_release_can_record_what_it_leaves_behind(tmp_path) -> None:
    folder = tmp_path / "next"
    folder.mkdir()
    record(folder, tmp_path)
    assert json.loads((folder / "ends.json").read_text()).keys() == {*JOBS, "indexing", *MESSAGES}
    assert {file.name for file in folder.glob("*.jsonl")} == {f"{who}.jsonl" for who in ("preprocessor", "nodes", *MESSAGES)}
    assert json.loads((folder / "store.json").read_text())["headrace:format"] == FORMAT
