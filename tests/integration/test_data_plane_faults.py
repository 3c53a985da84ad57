"""Faults between the shards and the trainer, with real processes: it becomes slower, memory stays, nothing is lost, and a
metric shows it (docs/metrics.md, "What you see when")."""

from __future__ import annotations

import gzip
import itertools
import re
import resource
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace import trainer
from headrace.cli.example import example_data
from headrace.observability import metrics
from headrace.processes import Process
from tests.http_site import Site, running_site

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0
MIB = 1 << 20


Metrics = dict[tuple[str, str], float]
"""By name without the service, and the value of the label."""


def shown_by(process: Process) -> Metrics:
    """What a process serves, which was started with --metrics and listens."""
    found = re.search(r"metrics url=(\S+)", process.log.read_text())
    assert found is not None
    with urllib.request.urlopen(found[1], timeout=10) as reply:
        text = reply.read().decode()
    return {
        (sample.name.removeprefix(f"headrace_{process.name}_"), ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Preprocessor:
    """A preprocessor in a process of its own, with one thread and its metrics served."""

    def __init__(self, cluster: Any, *, budget_mib: int = 64, cache: Path | None = None) -> None:
        log = cluster.folder / f"preprocessor-{len(cluster.preprocessors)}.log"
        arguments = ["preprocessor", "--reorder", cluster.endpoint, "--threads", "1", "--metrics", "127.0.0.1:0"]
        arguments += ["--data-root", str(example_data()), "--allow-url", "http://", "--allow-local-urls"]
        arguments += ["--budget-mib", str(budget_mib), *(["--cache", str(cache)] if cache else [])]
        self.process = cluster.group.add(Process("preprocessor", arguments, log))
        cluster.preprocessors.append(self.process)
        self.process.endpoint()

    def metrics(self) -> Metrics:
        return shown_by(self.process)

    def __getitem__(self, name: str) -> float:
        """A metric; `name/label` of one value of its label; 0 for one that has not moved."""
        base, _, label = name.partition("/")
        return self.metrics().get((base, label), 0.0)

    def wait_until(self, holds: Callable[[Metrics], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds(self.metrics()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the preprocessor shows {self.metrics()}")
            time.sleep(0.05)  # polls a real service

    @property
    def peak_bytes(self) -> int:
        """Most memory that the process had at a time, shared memory included."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) << 10


def is_idle(shown: Metrics) -> bool:
    return shown["stage_parts", "decode"] == 0 and shown["stage_parts", "store"] > 0


def sources(site: Site) -> list[dict[str, str]]:
    return [{"path": f"{site.url}/{name}", "name": name.partition("-")[0]} for name in site.files]


@pytest.fixture
def site() -> Iterator[Site]:
    """Shards of the example behind HTTP."""
    with running_site() as site:
        for name in ("pictures-00000.tar", "charts-00000.tar", "tables-00000.tar"):
            site.files[name] = (example_data() / name).read_bytes()
        yield site


def all_samples(cluster: Any, job: str) -> int:
    """How many samples a job that is done has consumed, each once and none refused."""
    status = cluster.wait_for_state(job, "done")
    names = [name for entry in cluster.ledger(job) for name in entry.samples]
    assert len(names) == len(set(names))
    assert status.quarantined_samples == 0
    return len(names)


@pytest.mark.slow
def test_a_trainer_that_stops_reading_and_a_store_that_is_full_leave_memory_flat(cluster: Any, spec: Any) -> None:
    """The window holds about ten times the budget, and a part more than a fifth of it."""
    budget_mib = 8
    cluster.start_reorder()
    preprocessor = Preprocessor(cluster, budget_mib=budget_mib)
    large = {"global_batch": 32, "part_samples": 4, "steps": 8, "window": 8, "image": {"max_pixels": 448 * 448}}
    cluster.consume(cluster.submit(spec("warm", **large)))  # codecs are loaded, caches are full
    before, decoded_before = preprocessor.peak_bytes, preprocessor["decoded_bytes_total"]

    job = cluster.submit(spec("slow", seed=1, **large))
    with trainer.connect(cluster.endpoint, job=job, prefetch_bytes=MIB) as loader:
        steps = iter(loader)
        first = next(steps)
        preprocessor.wait_until(lambda shown: is_idle(shown) and shown["stage_bytes", "store"] > budget_mib * MIB / 2)
        shown = preprocessor.metrics()
        assert shown["stage_bytes", "store"] + shown["stage_bytes", "read"] <= budget_mib * MIB
        list(first)
        loader.commit(first)
        for step in steps:
            list(step)
            loader.commit(step)
    assert [entry.step for entry in cluster.ledger(job)] == list(range(8))
    decoded_bytes = preprocessor["decoded_bytes_total"] - decoded_before
    assert preprocessor.peak_bytes - before < decoded_bytes / 4, "it did not keep what it decoded"
    assert preprocessor["parts_evicted_total"] > 0


@pytest.mark.slow
def test_two_preprocessors_share_a_cache_before_a_server_that_throttles(
    cluster: Any, spec: Any, site: Site, tmp_path: Path
) -> None:
    """Packed shards, since all of these is needed: single samples of others are read before the whole of them is fetched."""
    site.files = {f"{name}.gz": gzip.compress(data) for name, data in site.files.items()}
    site.failures = [(503, {"Retry-After": "1"})] * 3
    cluster.start_reorder()
    both = [Preprocessor(cluster, cache=tmp_path / "cache") for _ in range(2)]
    job = cluster.submit(spec("remote", sources=sources(site), epochs=1))
    cluster.consume(job)
    assert all_samples(cluster, job) > 0
    for name, data in site.files.items():
        assert site.sent[name] == len(data), "downloaded once, and not asked for by listing"
    assert sum(one["cache_downloaded_bytes_total"] for one in both) == sum(map(len, site.files.values()))
    assert sum(one["download_retries_total/throttled"] for one in both) == 3
    assert sum(one["download_pause_seconds_total"] for one in both) == 3
    assert sum(one["cache_bypasses_total/disk"] + one["cache_bypasses_total/no_room"] for one in both) == 0
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == ["", ".shard", ".shard", ".shard"]


@pytest.mark.slow
def test_a_full_disk_under_the_cache_slows_down_and_loses_nothing(cluster: Any, spec: Any, site: Site, tmp_path: Path) -> None:
    cluster.start_reorder()
    local = spec("local", sources=[{"path": str(example_data() / name), "name": name} for name in site.files], epochs=1)
    preprocessor = Preprocessor(cluster, cache=tmp_path / "cache")
    cluster.consume(cluster.submit(local))
    expected = all_samples(cluster, "local")

    limit = 256 << 10  # no shard is that small, but what is kept of a tar's headers is
    _, hard = resource.prlimit(preprocessor.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(preprocessor.process.pid, resource.RLIMIT_FSIZE, (limit, hard))
    job = cluster.submit(spec("remote", sources=sources(site), epochs=1))
    cluster.consume(job)
    assert all_samples(cluster, job) == expected
    preprocessor.wait_until(lambda shown: shown.get(("cache_bypasses_total", "disk"), 0) >= len(site.files))  # in the background
    assert preprocessor["cache_downloaded_bytes_total"] == 0
    left = list((tmp_path / "cache").iterdir())
    assert [path.name for path in left if path.suffix == ".part"] == []
    assert sum(path.stat().st_size for path in left) < limit


@pytest.mark.slow
def test_shards_that_vanish_are_read_by_the_preprocessor_that_has_them(
    cluster: Any, spec: Any, site: Site, tmp_path: Path
) -> None:
    """The first has all in its cache and room for little, so that work waits for the second, which finds nothing."""
    cluster.start_reorder()
    first = Preprocessor(cluster, cache=tmp_path / "first", budget_mib=1)
    job = cluster.submit(spec("vanishing", sources=sources(site), epochs=1, part_samples=2))
    with trainer.connect(cluster.endpoint, job=job, prefetch_bytes=MIB) as loader:
        steps = iter(loader)
        begun = next(steps)
        site.files.clear()
        second = Preprocessor(cluster, cache=tmp_path / "second")
        second.wait_until(lambda shown: shown["orders_failed_total", ""] > 0)
        for step in itertools.chain([begun], steps):
            list(step)
            loader.commit(step)
    assert all_samples(cluster, job) > 0
    assert first["orders_failed_total"] == 0
    assert second["samples_decoded_total"] == 0


def test_all_services_show_what_they_do(cluster: Any, spec: Any) -> None:
    def received() -> float:
        return metrics.TRAINER.get_sample_value("headrace_trainer_parts_received_total", {"transport": "shared_memory"}) or 0.0

    arguments = ["reorder", "--listen", "127.0.0.1:0", "--store", f"embedded:{cluster.folder / 'store'}"]
    cluster.reorder = Process("reorder", [*arguments, "--metrics", "127.0.0.1:0"], cluster.folder / "reorder.log")
    cluster.endpoint = cluster.group.add(cluster.reorder).endpoint()
    preprocessor = Preprocessor(cluster)
    job = cluster.submit(spec("shown", steps=6, window=2))
    before = received()
    with trainer.connect(cluster.endpoint, job=job) as loader:
        for step in loader:
            preprocessor.wait_until(is_idle)  # all of the window is planned and decoded
            shown = shown_by(cluster.reorder)
            assert shown["members", ""] == shown["jobs", ""] == 1
            assert 1 <= shown["planned_steps", ""] <= 2
            assert shown["parts", "placed"] > 0
            list(step)
            loader.commit(step)
    cluster.wait_for_state(job, "done")
    shown = shown_by(cluster.reorder)
    assert (shown["jobs", ""], shown["leases", ""], shown["parts", "waiting"]) == (0, 0, 0)
    delivered = preprocessor["parts_delivered_total/shared_memory"]
    assert received() - before == delivered > 0
    assert (metrics.TRAINER.get_sample_value("headrace_trainer_data_wait_seconds_count") or 0) >= 6
