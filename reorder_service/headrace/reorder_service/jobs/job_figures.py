"""Where jobs stand, for the metrics with a job's name: read by the exporter's thread while the jobs go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from headrace.observability.job_metrics import JobFigures
from headrace.reorder_service.jobs.job import JobRun


def figures_of(runs: Iterable[JobRun]) -> Iterator[JobFigures]:
    """Yield the figures of those jobs that have not ended."""
    for run in runs:
        cursor = run.cursor
        if cursor.is_over:
            continue
        refused = Counter(dict(cursor.quarantined)) + Counter(dict(run.manifest.damaged))
        yield JobFigures(
            job=run.name,
            committed_steps=cursor.committed,
            committed_samples=cursor.progress.samples,
            last_loss=cursor.progress.last_loss,
            quarantined={str(reason): count for reason, count in refused.items()},
        )
