"""The figures of `headrace top` in their public JSON form, from which the table is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from headrace.bottleneck import WAITS, bottleneck
from headrace.cli.scale.load import load_of
from headrace.cli.scale.scaling_policy import needed
from headrace.jobs_client import state_name
from headrace.rates import Look, data_wait, decoding_rates, samples_per_s, steps_per_s
from headrace.snapshot import NOBODY
from headrace.v1.jobs_pb2 import JobStatus, RankStatus
from headrace.v1.membership_pb2 import Recovered, Snapshot


def figures(jobs: Sequence[Sequence[Look]]) -> dict[str, Any]:
    """Return the figures of a service from the looks at each of its jobs: seconds, bytes, shares of 1; null if not known yet.

    The service and its preprocessors are those of the last job's status, and null and empty without a job. How many preprocessors
    are needed is of the present alone; `headrace scale` has its limits and its patience beside it.
    """
    service, preprocessors = None, []
    if jobs:
        status = jobs[-1][-1].status
        needed_now = needed(load_of(jobs), WAITS).wanted if status.preprocessors else None
        service = {"leader": status.leader, "term": status.term, "up_s": status.up_s, "preprocessors_needed": needed_now}
        preprocessors = _preprocessors(jobs[-1])
    return {"service": service, "jobs": [_job(looks) for looks in jobs], "preprocessors": preprocessors}


def _job(looks: Sequence[Look]) -> dict[str, Any]:
    status = looks[-1].status
    return {
        "job": status.job,
        "state": state_name(status),
        "paused": status.paused,
        "generation": status.generation,
        "committed_steps": status.committed_steps,
        "num_steps": status.num_steps or None,
        "planned_steps": status.planned_steps,
        "planned_bytes": status.planned_bytes,
        "window_bytes": status.window_bytes,
        "samples": status.committed_samples,
        "quarantined": status.quarantined_samples,
        "samples_per_s": samples_per_s(looks),
        "steps_per_s": steps_per_s(looks),
        "data_wait_fraction": data_wait(looks),
        **step_times(status),
        "bottleneck": dataclasses.asdict(bottleneck(looks)),
        "warning": status.warning or None,
        "sources": _sources(status),
        "ranks": [] if status.HasField("snapshot") else [_rank(rank) for rank in status.ranks],
        "nodes": _nodes(status.snapshot) if status.HasField("snapshot") else None,
        "recoveries": [_recovery(recovered) for recovered in status.recoveries],
    }


def step_times(status: JobStatus) -> dict[str, float | None]:
    """Return the forecast and the measured seconds of a step, and the error of the forecast; None until there is a forecast."""
    forecast_s, measured_s = status.forecast_step_s or None, status.measured_step_s or None
    return {
        "forecast_step_s": forecast_s,
        "measured_step_s": measured_s,
        "forecast_error": forecast_s / measured_s - 1.0 if forecast_s and measured_s else None,
    }


def _sources(status: JobStatus) -> list[dict[str, Any]]:
    samples, tokens = (sum(getattr(source, name) for source in status.sources) for name in ("samples", "tokens"))
    return [
        {
            "source": source.source,
            "share": source.share,
            "samples": source.samples,
            "samples_share": source.samples / samples if samples else None,
            "tokens": source.tokens,
            "tokens_share": source.tokens / tokens if tokens else None,
            "refused": source.refused,
            "filtered": source.filtered,
            "truncated": source.truncated,
        }
        for source in status.sources
    ]


def _rank(rank: RankStatus) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "next_step": rank.committed_steps,
        "data_wait_s": rank.data_wait_s if rank.step_s else None,
        "data_wait_fraction": rank.data_wait_s / rank.step_s if rank.step_s else None,
    }


def _nodes(snapshot: Snapshot) -> dict[str, Any]:
    """Return the newest pipelines of a recoverable job. Layers are counted within their unit."""
    return {
        "generation": snapshot.generation,
        "change": snapshot.change,
        "choice": snapshot.choice,
        "error": snapshot.error,
        "pipelines": [
            {
                "microbatches": pipeline.num_microbatches,
                "stages": [
                    {
                        "node": snapshot.nodes[stage.rank].name if stage.rank != NOBODY else None,
                        "process": stage.process,
                        "unit": stage.unit,
                        "first_layer": stage.first_layer,
                        "end_layer": stage.end_layer,
                    }
                    for stage in pipeline.stages
                ],
            }
            for pipeline in snapshot.pipelines
        ],
    }


def _recovery(recovered: Recovered) -> dict[str, Any]:
    return {
        "generation": recovered.generation,
        "step": recovered.step,
        "change": recovered.change,
        "choice": recovered.choice,
        "total_s": sum(phase.seconds for phase in recovered.phases),
        "phases_s": {phase.name: phase.seconds for phase in recovered.phases},
    }


def _preprocessors(looks: Sequence[Look]) -> list[dict[str, Any]]:
    rates = decoding_rates(looks)
    return [
        {
            "preprocessor": member.preprocessor,
            "endpoint": member.endpoint,
            **dataclasses.asdict(rates[member.preprocessor]),
            "leases": member.leases,
            "slots": member.slots,
            "ordered": member.occupancy.ordered,
            "read": member.occupancy.read,
            "decoding": member.occupancy.decoding,
            "stored": member.occupancy.stored,
            "store_bytes": member.store_bytes,
            "store_budget_bytes": member.store_budget_bytes,
        }
        for member in sorted(looks[-1].status.preprocessors, key=lambda member: member.preprocessor)
    ]
