"""Metrics: declared once, documented, and served to whoever asks."""

from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from headrace.cli.run.train import metrics_of_rank
from headrace.errors import EndpointError
from headrace.observability import metrics
from headrace.observability.job_metrics import JobsCollector

DOCUMENT = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
DECLARED = {name: item for name, item in vars(metrics).items() if isinstance(item, Counter | Gauge | Histogram)}
NAME = r"headrace_[a-z_]+"
UNITS = (
    "_bytes",
    "_seconds",
    "_seconds_total",
    "_total",
    "_parts",
    "_steps",
    "_leases",
    "_jobs",
    "_members",
    "_leaders",
    "_terms",
)


def full_name(metric: Counter | Gauge | Histogram) -> str:
    (family,) = metric.describe()
    return family.name + ("_total" if family.type == "counter" else "")


def all_names() -> list[str]:
    of_jobs = [family.name + ("_total" if family.type == "counter" else "") for family in JobsCollector().describe()]
    return sorted([*map(full_name, DECLARED.values()), *of_jobs])


def test_the_document_has_every_metric_that_is_declared_and_no_other() -> None:
    rows = re.findall(rf"^\| `({NAME})` \|", DOCUMENT, re.MULTILINE)
    assert sorted(rows) == all_names()


def test_what_you_see_names_metrics_that_there_are() -> None:
    assert sorted(set(re.findall(NAME, DOCUMENT))) == all_names(), "each one is of use to somebody"


@pytest.mark.parametrize("metric", DECLARED.values(), ids=full_name)
def test_a_metric_has_a_unit_a_service_and_few_labels(metric: Counter | Gauge | Histogram) -> None:
    name = full_name(metric)
    (family,) = metric.describe()
    row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| `{name}`"))
    assert name.endswith(UNITS)
    labels = row.split("|")[3].strip().partition(":")[0]
    assert metric._labelnames == (tuple(labels.split(", ")) if labels else ())
    assert family.documentation.endswith(".")
    registries = [service for service, registry in metrics.REGISTRIES.items() if registered(registry, family.name)]
    assert registries == [name.split("_")[1]]


def registered(registry: CollectorRegistry, name: str) -> bool:
    return any(family.name == name for family in registry.collect())


def test_a_registry_is_served_until_the_block_ends() -> None:
    with metrics.exported("127.0.0.1:0", metrics.PREPROCESSOR) as url:
        with urllib.request.urlopen(url, timeout=10) as reply:
            families = {family.name for family in text_string_to_metric_families(reply.read().decode())}
        assert "headrace_preprocessor_stage_parts" in families
        assert "process_resident_memory_bytes" in families
        assert not any(name.startswith(("headrace_reorder", "headrace_trainer")) for name in families)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_a_gauge_asks_when_it_is_read() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("headrace_test_parts", "Parts.", ["stage"], registry=registry)
    held = [1]
    metrics.watch(gauge, {"read": lambda: sum(held), "store": lambda: 2.0})
    held.append(4)
    assert registry.get_sample_value("headrace_test_parts", {"stage": "read"}) == 5
    assert registry.get_sample_value("headrace_test_parts", {"stage": "store"}) == 2


def test_nothing_is_served_unless_it_is_asked_for() -> None:
    with metrics.exported("", metrics.PREPROCESSOR) as url:
        assert url == ""


def test_a_busy_port_is_told_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        listen = f"127.0.0.1:{busy.getsockname()[1]}"
        with (
            pytest.raises(
                EndpointError, match=f"cannot serve metrics on {listen}: Address already in use; give --metrics another"
            ),
            metrics.exported(listen, metrics.TRAINER),
        ):
            pass


@pytest.mark.parametrize("listen", ["9100", "127.0.0.1:", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_told(listen: str) -> None:
    with pytest.raises(EndpointError, match="is not HOST:PORT"), metrics.exported(listen, metrics.TRAINER):
        pass


@pytest.mark.parametrize(
    ("listen", "local_rank", "own"),
    [
        ("", "3", ""),
        ("127.0.0.1:9100", None, "127.0.0.1:9100"),
        ("[::1]:9100", "3", "[::1]:9103"),
        ("0.0.0.0:0", "3", "0.0.0.0:0"),
    ],
)
def test_the_ranks_of_a_host_have_ports_of_their_own(
    listen: str, local_rank: str | None, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert metrics_of_rank(listen) == own
