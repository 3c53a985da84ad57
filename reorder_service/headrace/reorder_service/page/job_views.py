"""What the page shows of the service and of jobs, from the latest looks at them. Pure: looks in, plain data for JSON out.

Times are in seconds, the names are those of docs/page.md, and what is not known is None, never a guess.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.bottleneck import bottleneck, decoding_threads, is_held_up, is_over
from headrace.jobs_client import state_name
from headrace.manifest import ShardTable, split_name
from headrace.quarantine import Rejected
from headrace.rates import Look, decoding_rates, samples_per_s
from headrace.snapshot import node_state
from headrace.v1.jobs_pb2 import JobStatus, RankStatus, SourceStatus
from headrace.v1.membership_pb2 import Recovered


def figure(value: float | None) -> float | None:
    """Return a number with six significant digits; None for one that is not finite or not known."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def preprocessors_view(looks: Sequence[Look]) -> list[dict[str, Any]]:
    """Return the preprocessors that are connected now. looks: at the service, of which only `preprocessors` counts."""
    rates = decoding_rates(looks) if len(looks) > 1 else {}
    return [
        {
            "id": member.preprocessor,
            "host": member.endpoint.rpartition(":")[0],
            "threads": decoding_threads(member.slots),
            "decoding": member.occupancy.decoding,
            "waiting": member.occupancy.ordered,
            "read": member.occupancy.read,
            "store_bytes": member.store_bytes,
            "store_budget_bytes": member.store_budget_bytes,
            "samples_per_s": figure(rates[member.preprocessor].samples_per_s) if rates else None,
            "late": member.late,
            "silent": member.silent,
        }
        for member in sorted(looks[-1].status.preprocessors, key=lambda member: member.preprocessor)
    ]


def listed_view(looks: Sequence[Look]) -> dict[str, Any]:
    """Return what the list of jobs shows of one. looks: at least one, the latest last."""
    status = looks[-1].status
    over = is_over(status)
    told = bool(status.spec_json) or over  # jobs that are set aside have nothing but a sentence
    return {
        "job": status.job,
        "state": state_name(status),
        "message": status.message,
        "committed_steps": status.committed_steps,
        "num_steps": status.num_steps or None,
        "samples_per_s": figure(samples_per_s(looks)) if len(looks) > 1 and not over else None,
        "ranks": len(status.ranks),
        "held_up": not over and told and is_held_up(looks),
        "finding": str(bottleneck(looks)) if told else status.message,
    }


def job_view(looks: Sequence[Look], *, units: Mapping[int, str], ended_s: float | None = None) -> dict[str, Any]:
    """Return what the page of one job shows.

    looks: at least one, the latest last. units: the unit of each rank that has named it. ended_s: in seconds since 1970. When a
    job was submitted, the service does not keep.
    """
    status = looks[-1].status
    spec = json.loads(status.spec_json)
    samples = sum(source.samples for source in status.sources)
    return listed_view(looks) | {
        "planned_steps": status.planned_steps,
        "samples": status.committed_samples,
        "quarantined": status.quarantined_samples,
        "strategy": spec["strategy"],
        "batch_size": spec["global_batch"],
        "generation": status.generation,
        "loss": figure(status.last_loss),
        "started": None,
        "ended": ended_s,
        "warning": status.warning or None,
        "mixture": [_source_view(source, samples) for source in status.sources],
        "ranks": [_rank_view(rank, units.get(rank.rank)) for rank in status.ranks],
        "nodes": _node_views(status),
        "recoveries": [_recovery_view(recovered) for recovered in status.recoveries],
    }


def quarantine_view(rejected: Sequence[Rejected], total: int, shards: ShardTable) -> dict[str, Any]:
    """Return a page of the quarantine, of `total` samples and shards. shards: those of the job.

    The service has no payload: there are no thumbnails.
    """
    numbers = shards.numbers_of({prefix for item in rejected for prefix in _prefixes(item.name)})
    return {
        "total": total,
        "rejections": [
            {
                "sample": item.name,
                "shard": _shard_of(item.name, numbers),
                "row": item.row,
                "reason": str(item.reason),
                "detail": item.detail,
                "when": None,
                "modality": item.modality or None,
                "thumbnail": f"data:image/jpeg;base64,{b64encode(item.thumbnail).decode()}" if item.thumbnail else None,
            }
            for item in rejected
        ],
    }


def _prefixes(name: str) -> Iterator[str]:
    """Yield all that may be the name of a sample's shard."""
    yield from (name[:end] for end, letter in enumerate(name) if letter == "/")
    yield name


def _shard_of(name: str, numbers: Mapping[str, int]) -> str | None:
    place = split_name(name, numbers)
    return None if place is None else name.removesuffix(f"/{place[1]}") if place[1] else name


def _source_view(source: SourceStatus, samples: int) -> dict[str, Any]:
    return {
        "source": source.source,
        "asked": figure(source.share),
        "delivered": figure(source.samples / samples) if samples else None,
        "samples": source.samples,
        "refused": source.refused,
        "filtered": source.filtered,
        "truncated": source.truncated,
    }


def _rank_view(rank: RankStatus, unit: str | None) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "unit": unit,
        "host": None,
        "connected": rank.connected,
        "committed_steps": rank.committed_steps,
        "step_s": figure(rank.step_s) if rank.step_s else None,
        "data_wait_s": figure(rank.data_wait_s) if rank.step_s else None,
    }


def _node_views(status: JobStatus) -> list[dict[str, Any]]:
    hosts = {node.name: node.address.rpartition(":")[0] or None for node in status.snapshot.nodes}
    return [
        {"node": node.node, "state": node_state(node, status.snapshot), "host": hosts.get(node.node)}
        for node in sorted(status.nodes, key=lambda node: node.node)
    ]


def _recovery_view(recovered: Recovered) -> dict[str, Any]:
    took_s = sum(phase.seconds for phase in recovered.phases)
    sentence = ", ".join(part for part in (recovered.change, recovered.choice) if part)
    return {"step": recovered.step, "when": None, "sentence": sentence, "took_s": figure(took_s)}
