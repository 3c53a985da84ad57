"""What the metrics of a reorder service say of jobs: steps, samples, loss and refusals, for as long as a job has not ended."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.observability import metrics
from headrace.observability.job_metrics import MOST_JOBS, JobFigures, JobsCollector
from headrace.reorder_service import server
from headrace.reorder_service.service import ReorderService
from tests.unit.reorder_service.job_world import Preprocessor, Start, consume, submit


def of_jobs() -> dict[tuple[str, ...], float]:
    """Return the samples of the metrics by job: (name, job, and reason where there is one) -> value."""
    return {
        (sample.name.removeprefix("headrace_reorder_job_"), *sample.labels.values()): sample.value
        for metric in metrics.JOB_FIGURES.collect()
        for sample in metric.samples
    }


def of_all(name: str, **labels: str) -> float:
    return metrics.REORDER.get_sample_value(f"headrace_reorder_{name}_total", labels) or 0.0


@pytest.fixture(autouse=True)
def _no_source_is_left() -> object:
    yield
    metrics.JOB_FIGURES.source = tuple


def lead(service: ReorderService) -> None:
    server._set_up_gauges(SimpleNamespace(active_service=service))  # type: ignore[arg-type]


async def test_a_job_is_told_by_name_until_it_ends_and_the_sums_stay(start: Start) -> None:
    service = await start()
    lead(service)
    before = {name: of_all(name) for name in ("committed_steps", "committed_samples")}
    refused = of_all("quarantined_samples", reason="corrupt_media")
    Preprocessor(service=service, bad_rows={1, 2}).join()
    run = await submit(service, name="mine", join=False, steps=6)
    await run.wait_ready()
    assert of_jobs() == {("committed_steps", "mine"): 0, ("committed_samples", "mine"): 0}
    session = run.open_session(0, 1)
    await consume(run, session, stop=5)
    await submit(service, name="other", join=False)
    told = of_jobs()
    assert (told["committed_steps", "mine"], told["last_loss", "mine"]) == (5, 4.0)
    assert told["committed_samples", "mine"] == run.cursor.progress.samples
    bad = await service.store.num_quarantined("mine")
    assert told.get(("quarantined_samples_total", "mine", "corrupt_media"), 0) == bad
    assert told["committed_steps", "other"] == 0
    await consume(run, session)
    assert run.cursor.state == "DONE"
    assert {labels[1] for labels in of_jobs()} == {"other"}
    assert of_all("committed_steps") - before["committed_steps"] == 6
    assert of_all("committed_samples") - before["committed_samples"] == run.cursor.progress.samples == 22
    assert of_all("quarantined_samples", reason="corrupt_media") - refused == 2


def test_every_metric_is_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = {
        metric.name + "_total" * (metric.type == "counter")
        for registry in metrics.REGISTRIES.values()
        for metric in registry.collect()
        if metric.name.startswith("headrace_")
    }
    assert len(names) > 40
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


async def test_a_service_that_stands_by_tells_no_job(start: Start) -> None:
    await submit(await start(), join=False)
    lead(None)  # type: ignore[arg-type]
    assert of_jobs() == {}


def test_no_more_than_so_many_jobs_are_told_and_no_loss_that_nobody_reported() -> None:
    collector = JobsCollector()
    nan = float("nan")
    collector.source = lambda: [
        JobFigures(job=f"job{n}", committed_steps=n, committed_samples=n, last_loss=nan, quarantined={}) for n in range(500)
    ]
    steps, samples, loss, quarantined = collector.collect()
    assert [len(metric.samples) for metric in (steps, samples, loss, quarantined)] == [MOST_JOBS, MOST_JOBS, 0, 0]
    assert [metric.name for metric in collector.describe()] == [metric.name for metric in collector.collect()]


async def test_the_log_of_a_commit_names_no_forecast_where_there_is_none(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.reorder_service.jobs.cursor")
    run = await submit(await start())
    await consume(run, run.open_session(0, 1), stop=1)
    (line,) = [record.getMessage() for record in caplog.records if record.message.startswith("committed")]
    assert "forecast_s=- " in line
    assert "nan" not in line
