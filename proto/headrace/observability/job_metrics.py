"""Figures of the jobs that have not ended, as metrics with the job's name for a label.

A label value stays in a Prometheus server for as long as its data: so at most MOST_JOBS jobs are told, those that were taken up
first, and a job is no longer told once it has ended. What must outlast jobs is in sums over all of them (`metrics`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

MOST_JOBS = 100
"""Whose figures are told; with some 20 reasons, at most 2,300 time series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """Where one job stands."""

    job: str
    committed_steps: int
    committed_samples: int
    last_loss: float
    """NaN while no rank has reported one."""
    quarantined: Mapping[str, int]
    """Reason -> number of samples since this process leads."""


class JobsCollector(Collector):
    """Asks `source` for the figures of the jobs that have not ended whenever it is read, from the exporter's thread."""

    def __init__(self) -> None:
        self.source: Callable[[], Iterable[JobFigures]] = lambda: ()

    def describe(self) -> list[Metric]:
        """Return the metrics without a value."""
        return self._metrics(())

    def collect(self) -> list[Metric]:
        """Return the metrics of the first MOST_JOBS jobs."""
        return self._metrics(islice(self.source(), MOST_JOBS))

    def _metrics(self, jobs: Iterable[JobFigures]) -> list[Metric]:
        steps = GaugeMetricFamily("headrace_reorder_job_committed_steps", "Committed steps of a job.", labels=["job"])
        samples = GaugeMetricFamily("headrace_reorder_job_committed_samples", "Samples of these steps.", labels=["job"])
        loss = GaugeMetricFamily("headrace_reorder_job_last_loss", "The latest loss that its ranks reported.", labels=["job"])
        quarantined = CounterMetricFamily(
            "headrace_reorder_job_quarantined_samples", "Samples refused since this process leads.", labels=["job", "reason"]
        )
        for one in jobs:
            steps.add_metric([one.job], one.committed_steps)
            samples.add_metric([one.job], one.committed_samples)
            if not math.isnan(one.last_loss):
                loss.add_metric([one.job], one.last_loss)
            for reason, count in one.quarantined.items():
                quarantined.add_metric([one.job, reason], count)
        return [steps, samples, loss, quarantined]
