"""`headrace job quarantine`: every sample that a job does not use, and why."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.jobs_client import JobsClient

FORMATS = ("table", "json", "jsonl")


def print_quarantine(client: JobsClient, job: str, output: str) -> None:
    """Print a job's quarantined samples on standard output, sorted by name, in the format `output` (one of FORMATS)."""
    rows = quarantine_rows(client, job)
    counts = dict(Counter(row["reason"] for row in rows).most_common())
    if output == "jsonl":
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
    elif output == "json":
        print(json.dumps({"job": job, "quarantined": rows, "reasons": counts}, ensure_ascii=False))
    else:
        _print_table(job, rows, counts)


def quarantine_rows(client: JobsClient, job: str) -> list[dict[str, Any]]:
    """Return the public JSON form of each quarantined sample of a job.

    What is unknown is null: `number` (in the global order) and `step`; `row` (in the shard) of damage that indexing found, which
    is in no row; and `key` of damage to the shard as a whole.
    """
    from headrace.manifest import split_name
    from headrace.peer_spec import load_peer_spec_json

    spec = load_peer_spec_json(client.show(job).spec_json)
    shards, _ = client.manifest(job)
    numbers = {shard.name: number for number, shard in enumerate(shards)}
    rows = []
    for item in client.quarantine(job):
        place = split_name(item.name, numbers)
        shard, key = (shards[place[0]], place[1]) if place else (None, item.name)
        rows.append(
            {
                "sample": item.name,
                "reason": str(item.reason),
                "detail": item.detail,
                "source": spec.sources[shard.source].name if shard else None,
                "shard": shard.name.partition("/")[2] if shard else None,
                "key": key or None,
                "url": shard.url if shard else None,
                "row": item.row,
                "number": item.sample_id,
                "step": None if item.sample_id is None else item.sample_id // spec.global_batch,
            }
        )
    return rows


def _print_table(job: str, rows: list[dict[str, Any]], counts: dict[str, int]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from headrace.printable import printable

    console = Console()
    if not rows:
        console.print(f"no sample of job {job} is quarantined", markup=False, highlight=False)
        return
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    columns = ("reason", "source", "shard", "key", "row", "step")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in ("row", "step") else "left")
    table.add_column("detail", overflow="fold", ratio=1)
    for row in rows:
        table.add_row(*(Text("–" if row[column] is None else printable(str(row[column]))) for column in (*columns, "detail")))
    console.print(table)
    for reason, count in counts.items():
        console.print(f"{count:,} {reason}", markup=False, highlight=False)
    console.print(f"{len(rows):,} in all; `headrace replay {job} SOURCE/SHARD/KEY` shows why", markup=False, highlight=False)
