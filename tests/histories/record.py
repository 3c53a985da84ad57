"""Record what this release stores and sends, from real processes: python -m tests.histories.record VERSION

A developer runs it once, at a release, and commits tests/histories/VERSION. It takes half a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import redis

from headrace import trainer
from headrace.execution_spec import ExecutionSpec
from headrace.jobs_client import JobsClient
from headrace.ledger import ledger_sha256
from headrace.processes import ProcessGroup
from headrace.topology_spec import TopologySpec
from headrace.trainer.loading.session import SessionClient
from headrace.trainer.recovery.membership_client import MembershipClient
from headrace.v1.membership_pb2 import Formation, ModelProfile, NodeHello, NodesSpec, UnitLayers
from tests.histories.history import DATA, HISTORIES, RECORDED_DATA, dump_store, write_messages
from tests.histories.recording_proxy import RecordingProxy
from tests.integration.conftest import Cluster, make_spec
from tests.redis_server import RedisServer

EXAMPLES, HOSTILE = f"{RECORDED_DATA}/examples", f"{RECORDED_DATA}/hostile"
SMALL = {"path": f"{EXAMPLES}/text-00000.tar", "name": "text"}
MEDIA = {"path": f"{EXAMPLES}/tables-00000.tar", "name": "media"}
SOUND = {"path": f"{EXAMPLES}/sound-00000.tar", "name": "sound"}
DAMAGED = {"path": f"{HOSTILE}/*.tar", "name": "damaged", "on_bad": "substitute"}
PATIENCE_S = 30.0
_LAYERS = [UnitLayers(unit="encoder", num_layers=2), UnitLayers(unit="llm", num_layers=2)]
_PROFILE = ModelProfile(units=_LAYERS, seconds=[1.0] * 4, layer_bytes=[1] * 4, memory_bytes=4)
NODES = NodesSpec(num_nodes=5, max_failures=1, num_microbatches=4, profile=_PROFILE)
"""Five nodes, of which two or more make a pipeline."""

JOBS: dict[str, dict[str, Any]] = {
    "running": {"sources": [SMALL, MEDIA, SOUND, DAMAGED], "steps": 6},
    "paused": {"sources": [SMALL], "steps": 4},
    "changed": {
        "sources": [{**SMALL, "weight": 1}, {**MEDIA, "weight": 1}],
        "steps": 10,
        "topology": {"replicas": 2, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}},
    },
    "measured": {"sources": [SMALL], "steps": 11, "global_batch": 4, "execution": {"trainer": "colocated"}},
    "reset": {"sources": [SMALL], "steps": 4},
    "cut": {
        "sources": [{**SMALL, "filter": {"sizes": {"tokens": {"min": 24}}}}, {**SOUND, "max_epochs": 2}],
        "steps": 4,
        "text": {"max_tokens": 96, "too_long": "truncate_end"},
    },
    "sharded": {
        "sources": [MEDIA],
        "steps": 4,
        "topology": {"replicas": 2, "microbatches": 2, "stages": {"vision": 1, "llm": 1}},
        "execution": {"trainer": "fsdp"},
    },
    "paged": {"sources": [SMALL], "steps": 130, "global_batch": 1},
    "nodes": {"sources": [SMALL], "steps": 3, "topology": {"replicas": 2, "microbatches": 4}},
    "done": {"sources": [DAMAGED], "epochs": 1, "global_batch": 8},
    "failed": {"sources": [{"path": f"{EXAMPLES}/nowhere"}]},
    "cancelled": {"sources": [SMALL]},
}
"""Jobs by the state in which a history leaves them, and what their specs say besides `make_spec`. There is `indexing` besides."""
MESSAGES: dict[str, dict[str, Any]] = {
    "rank": {"sources": [SMALL, DAMAGED], "steps": 3, "global_batch": 8, "window": 2},
    "pipeline": {"sources": [MEDIA, SOUND], "steps": 2, "global_batch": 8, "pack_tokens": 4096, "text": {"max_tokens": 4096}},
}
"""Jobs of which the messages are recorded."""


class StopAfterStepError(Exception):
    """Ends the consumption of a job after a step."""


def after(last: int) -> Callable[[trainer.Step], None]:
    """Return an `on_step` that stops before step `last + 1` is committed."""

    def on_step(step: trainer.Step) -> None:
        if step.index > last:
            raise StopAfterStepError

    return on_step


def consume_until(cluster: Cluster, job: str, last: int, **options: Any) -> None:
    """Commit the steps of a job up to and including `last`."""
    try:
        cluster.consume(job, after(last), **options)
    except StopAfterStepError:
        return


def bring_into_states(cluster: Cluster, store: Any) -> None:
    """Bring the JOBS into the states that they are named after. `store`: a client of theirs."""
    for name, fields in JOBS.items():
        cluster.submit(make_spec(name, **fields))
    with cluster.client() as client:
        client.cancel("cancelled")
        cluster.consume("done")
        consume_until(cluster, "running", 2)
        consume_until(cluster, "paused", 1)
        client.pause("paused", True)
        consume_until(cluster, "changed", 1)
        client.set_weights("changed", 8, {"text": 3.0, "media": 1.0})
        topology = TopologySpec(replicas=4, microbatches=1, stages={"vision": 1, "llm": 2})
        client.set_topology("changed", topology, ExecutionSpec(trainer="pipeline"), None)
        consume_until(cluster, "changed", 2)
        consume_until(cluster, "measured", 8)
        consume_until(cluster, "reset", 2)
        client.reset("reset", 1)
        consume_until(cluster, "cut", 1)
        consume_until(cluster, "sharded", 1)
        cluster.wait_for_state("failed", "failed")
    consume_until(cluster, "paged", 127)
    deadline = time.monotonic() + PATIENCE_S
    while not store.hexists("headrace:{paged}:job", "paged"):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # polls a real service
    form_nodes(cluster, "nodes")


def form_nodes(cluster: Cluster, job: str) -> None:
    """Have five nodes join, lose one, and go on; their membership stays in the store when they are gone."""
    hellos = [NodeHello(job=job, node=name, address=f"127.0.0.1:{n}", spec=NODES) for n, name in enumerate("abcde", 1)]
    members = [MembershipClient(cluster.endpoint, hello) for hello in hellos]
    for member in members:
        member.open()
    members[0].wait(0, PATIENCE_S)
    members[4].close()
    lost = members[0].wait(1, PATIENCE_S)
    formation = Formation(generation=lost.generation, pipelines=lost.pipelines)
    members[0].recovered(formation, 0, {"detect": 0.1, "rebuild": 0.2})
    with cluster.client() as client:
        deadline = time.monotonic() + PATIENCE_S
        while not client.show(job).recoveries:
            assert time.monotonic() < deadline
            time.sleep(0.05)  # polls a real service
    for member in members[:4]:
        member.close()


def record_messages(cluster: Cluster, folder: Path) -> dict[str, dict[str, Any]]:
    """Write what preprocessor, rank, a process of a pipeline and nodes say to the service, and hear from it.

    Return the ends of their jobs.
    """
    service = cluster.endpoint
    proxies = {name: RecordingProxy(service) for name in ("preprocessor", "rank", "pipeline", "nodes")}
    cluster.endpoint = proxies["preprocessor"].endpoint
    cluster.add_preprocessors(1)
    for name, fields in MESSAGES.items():
        cluster.endpoint = proxies[name].endpoint
        job = cluster.submit(make_spec(name, **fields))
        if name == "rank":
            cluster.consume(job)
        else:
            follow_pipeline(cluster.endpoint, job)
    cluster.endpoint = proxies["nodes"].endpoint
    cluster.submit(make_spec("nodes", **JOBS["nodes"]))
    form_nodes(cluster, "nodes")
    for name, proxy in proxies.items():
        proxy.stop()
        write_messages(folder / f"{name}.jsonl", proxy.said)
    cluster.endpoint = service
    with cluster.client() as client:
        return {name: end_of(client, name) for name in MESSAGES}


def follow_pipeline(endpoint: str, job: str) -> None:
    """Commit all steps of a job as a process of a pipeline that has both replicas, and fetches nothing."""
    client = SessionClient(endpoint, job, 0, 1, replicas=(0, 1))
    client.open([])
    planned, placed, committed = set(), 0, 0
    for event in client.events():
        placed += event.HasField("location")
        planned |= {event.plan.step} if event.HasField("plan") else set()
        if committed in planned:
            client.commit(committed, [], float(committed), 0.1, 0.0, wait=True)
            committed += 1
    assert placed, "places are recorded too"
    client.close()


def end_of(client: JobsClient, job: str) -> dict[str, Any]:
    """Return what a job has come to: the hash of its ledger, and its quarantine."""
    refused = {item.name: str(item.reason) for item in client.quarantine(job)}
    return {"ledger": ledger_sha256(client.ledger(job)), "refused": dict(sorted(refused.items()))}


def finish(cluster: Cluster, jobs: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Have these jobs of a recorded store go on to their ends, and return these."""
    ends = {}
    with cluster.client() as client:
        client.pause("paused", False)
        for name in jobs:
            if name not in ("done", "failed", "cancelled"):
                cluster.consume(name)
                cluster.wait_for_state(name, "done")
            ends[name] = end_of(client, name)
    return ends


@contextlib.contextmanager
def serving(temporary: Path) -> Iterator[tuple[Cluster, Any]]:
    """Yield a cluster without preprocessors, and a client of its store."""
    (temporary / "redis").mkdir(parents=True)
    server = RedisServer(temporary / "redis")
    server.start()
    try:
        with ProcessGroup() as group, redis.Redis.from_url(server.url, decode_responses=True) as client:
            cluster = Cluster(group=group, folder=temporary)
            cluster.start_reorder(store=server.url)
            yield cluster, client
    finally:
        server.kill()


def record(folder: Path, temporary: Path) -> None:
    """Record a history into an empty `folder`."""
    for name, files in DATA.items():
        shutil.copytree(files, f"{RECORDED_DATA}/{name}")
    try:
        with serving(temporary / "states") as (cluster, client):
            cluster.add_preprocessors(1)
            bring_into_states(cluster, client)
            cluster.preprocessors[0].terminate()
            cluster.preprocessors[0].wait(5.0)
            cluster.submit(make_spec("indexing", sources=[SMALL], steps=2))
            dump_store(client, folder / "store.json")
            cluster.add_preprocessors(1)
            ends = finish(cluster, [*JOBS, "indexing"])
        with serving(temporary / "messages") as (cluster, _):
            ends |= record_messages(cluster, folder)
        (folder / "ends.json").write_text(json.dumps(ends, indent=1) + "\n")
    finally:
        shutil.rmtree(RECORDED_DATA)


def main() -> None:
    """Parse the arguments and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="name of the history, such as 0.2")
    folder = HISTORIES / parser.parse_args().version
    folder.mkdir()
    with tempfile.TemporaryDirectory() as temporary:
        record(folder, Path(temporary))


if __name__ == "__main__":
    main()
