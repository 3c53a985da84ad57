"""What the page shows of jobs and preprocessors, from statuses as the reorder service gives them."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import pytest

from headrace.manifest import ShardInfo, ShardTable
from headrace.quarantine import Reason, Rejected
from headrace.rates import Look
from headrace.reorder_service.page.job_views import figure, job_view, listed_view, preprocessors_view, quarantine_view
from headrace.v1 import jobs_pb2
from headrace.v1.common_pb2 import Occupancy
from headrace.v1.jobs_pb2 import JobStatus, NodeStatus, PreprocessorStatus, RankStatus, SourceStatus
from headrace.v1.membership_pb2 import Node, Phase, Pipeline, PipelineStage, Recovered, Snapshot
from tests.small_jpeg import small_jpeg

SPEC = {"strategy": "auto", "global_batch": 16, "window": 4, "window_bytes": None}


def member(decoded: int) -> PreprocessorStatus:
    return PreprocessorStatus(
        preprocessor="p1",
        endpoint="10.0.0.9:7100",
        slots=6,
        samples_decoded=decoded,
        store_bytes=5,
        store_budget_bytes=10,
        late=1,
        occupancy=Occupancy(ordered=3, read=2, decoding=1),
    )


def status(committed: int = 10, **fields: Any) -> JobStatus:
    running: dict[str, Any] = {
        "job": "demo",
        "state": jobs_pb2.JOB_STATE_RUNNING,
        "committed_steps": committed,
        "num_steps": 100,
        "committed_samples": 16 * committed,
        "step_s": float(committed),
        "last_loss": math.nan,
        "planned_steps": 4,
        "spec_json": json.dumps(SPEC),
        "preprocessors": [member(100)],
        "ranks": [RankStatus(rank=0, committed_steps=committed, step_s=1.0, data_wait_s=0.25, connected=True)],
        "leader": "10.0.0.1:7070",
        "generation": 1,
    }
    return JobStatus(**running | fields)


def looks(*statuses: JobStatus) -> list[Look]:
    """A second apart."""
    return [Look(at_s=float(n), status=one) for n, one in enumerate(statuses)]


def test_preprocessors_are_told_with_the_rate_at_which_they_decode() -> None:
    [first] = preprocessors_view(looks(status()))
    assert first == {
        "id": "p1",
        "host": "10.0.0.9",
        "threads": 2,
        "decoding": 1,
        "waiting": 3,
        "read": 2,
        "store_bytes": 5,
        "store_budget_bytes": 10,
        "samples_per_s": None,
        "late": 1,
        "silent": False,
    }
    [later] = preprocessors_view(looks(status(), status(preprocessors=[member(350)])))
    assert later["samples_per_s"] == 250.0


def test_a_running_job_in_the_list() -> None:
    first = listed_view(looks(status()))
    assert first["samples_per_s"] is None
    assert listed_view(looks(status(10), status(11))) == {
        "job": "demo",
        "state": "running",
        "message": "",
        "committed_steps": 11,
        "num_steps": 100,
        "samples_per_s": 16.0,
        "ranks": 1,
        "held_up": False,
        "finding": "preprocessors wait: all that is ordered is decoded, the trainer is the slowest part: "
        "nothing to gain from more preprocessors",
    }


@pytest.mark.parametrize(
    ("fields", "state", "held_up", "finding"),
    [
        ({"paused": True}, "paused", True, "paused, 4 planned steps left: `headrace job resume demo` goes on"),
        ({"state": jobs_pb2.JOB_STATE_DONE}, "done", False, "every step is committed"),
        ({"state": jobs_pb2.JOB_STATE_SET_ASIDE, "message": "why", "spec_json": ""}, "set_aside", False, "why"),
        (
            {"preprocessors": []},
            "running",
            True,
            "no preprocessor is connected: start one with `headrace preprocessor --endpoint 10.0.0.1:7070`",
        ),
    ],
    ids=["paused", "done", "set aside", "no preprocessor"],
)
def test_other_jobs_in_the_list(fields: dict[str, Any], state: str, held_up: bool, finding: str) -> None:
    seen = listed_view(looks(status(**fields)))
    assert (seen["state"], seen["held_up"], seen["finding"]) == (state, held_up, finding)


def test_the_page_of_a_job_says_null_where_nothing_is_known() -> None:
    sources = [SourceStatus(source="a", share=0.75, samples=30), SourceStatus(source="b", share=0.25, samples=10, refused=2)]
    seen = job_view(looks(status(sources=sources)), units={0: "llm"})
    listed = listed_view(looks(status(sources=sources)))
    assert {name: seen[name] for name in listed if name != "ranks"} == {n: v for n, v in listed.items() if n != "ranks"}
    assert (seen["strategy"], seen["batch_size"], seen["generation"], seen["loss"]) == ("auto", 16, 1, None)
    assert (seen["started"], seen["ended"]) == (None, None)
    assert [(one["source"], one["asked"], one["delivered"]) for one in seen["mixture"]] == [("a", 0.75, 0.75), ("b", 0.25, 0.25)]
    assert seen["ranks"] == [
        {
            "rank": 0,
            "unit": "llm",
            "host": None,
            "connected": True,
            "committed_steps": 10,
            "step_s": 1.0,
            "data_wait_s": 0.25,
        }
    ]
    assert (seen["nodes"], seen["recoveries"]) == ([], [])
    fresh = job_view(looks(status(0, ranks=[RankStatus(rank=3)], sources=[SourceStatus(source="a")], last_loss=0.5)), units={})
    assert (fresh["ranks"][0]["step_s"], fresh["ranks"][0]["unit"], fresh["mixture"][0]["delivered"]) == (None, None, None)
    assert fresh["loss"] == 0.5
    json.dumps([seen, fresh], allow_nan=False)


def test_the_nodes_of_a_recoverable_job() -> None:
    snapshot = Snapshot(
        generation=3,
        nodes=[Node(name="n0", address="10.0.0.3:29500")],
        pipelines=[Pipeline(stages=[PipelineStage(rank=0, unit="llm")], num_microbatches=2)],
    )
    nodes = [NodeStatus(node="n1", connected=True), NodeStatus(node="n0", connected=True), NodeStatus(node="n2")]
    recovered = Recovered(step=7, change="n2 was lost", choice="rebuild", phases=[Phase(name="copy", seconds=1.5)])
    seen = job_view(looks(status(nodes=nodes, snapshot=snapshot, recoveries=[recovered])), units={})
    assert [(node["node"], node["state"], node["host"]) for node in seen["nodes"]] == [
        ("n0", "trains", "10.0.0.3"),
        ("n1", "waits", None),
        ("n2", "away", None),
    ]
    assert seen["recoveries"] == [{"step": 7, "when": None, "sentence": "n2 was lost, rebuild", "took_s": 1.5}]


def test_rejections_are_told_with_their_shards() -> None:
    shards = ShardTable.of(ShardInfo(source=0, url=f"/d/{name}", name=f"charts/{name}") for name in ("x/a.tar", "b.tar"))
    rejected = [
        Rejected(
            name="charts/x/a.tar/00/7",
            reason=Reason.TOO_LARGE,
            detail="9 MB",
            sample_id=4,
            row=7,
            modality="image",
            thumbnail=small_jpeg(),
        ),
        Rejected(name="charts/b.tar", reason=Reason.ARCHIVE_CORRUPT, detail="ends early"),
        Rejected(name="elsewhere/0", reason=Reason.OTHER, detail="?"),
    ]
    seen = quarantine_view(rejected, 30, shards)
    assert seen["total"] == 30
    assert [one["shard"] for one in seen["rejections"]] == ["charts/x/a.tar", "charts/b.tar", None]
    assert seen["rejections"][0] == {
        "sample": "charts/x/a.tar/00/7",
        "shard": "charts/x/a.tar",
        "row": 7,
        "reason": "too_large",
        "detail": "9 MB",
        "when": None,
        "modality": "image",
        "thumbnail": f"data:image/jpeg;base64,{base64.b64encode(small_jpeg()).decode()}",
    }
    assert [(one["modality"], one["thumbnail"]) for one in seen["rejections"][1:]] == [(None, None)] * 2
    assert quarantine_view([], 0, ShardTable()) == {"total": 0, "rejections": []}


def test_figures_have_six_digits() -> None:
    assert [figure(value) for value in (1 / 3, 12345678.0, math.nan, math.inf, None)] == [0.333333, 12345700.0, None, None, None]
