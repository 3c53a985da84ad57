"""What the containers of deploy/kubernetes run and measure: commands, settings and metrics that are there."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.main import _parse
from headrace.observability import metrics
from tests.kubernetes_documents import BASE, DEPLOYMENTS, OVERLAYS, ROOT, containers, pod_specs
from tests.kustomization import kustomized

SOURCES = ("proto", "reorder_service", "preprocessor", "trainer", "cli")
HPA, KEDA = DEPLOYMENTS / "overlays" / "hpa", DEPLOYMENTS / "overlays" / "keda"
read = cache(kustomized)


def _containers() -> Iterator[tuple[str, dict[str, Any]]]:
    for folder in (BASE, *OVERLAYS):
        for document in read(folder):
            for pod in pod_specs(document):
                for container in containers(pod):
                    if container["image"].startswith("headrace-"):
                        yield f"{folder.name}-{container['name']}", container


CONTAINERS = dict(_containers())
SCRIPTS = {name: container for name, container in CONTAINERS.items() if container.get("command", [""])[0] == "sh"}
each = pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)


def _environment(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "0") for variable in container.get("env", [])}


@each
def test_headrace_takes_the_arguments(container: dict[str, Any]) -> None:
    command = container.get("command", ["headrace"])
    if command == ["headrace"]:
        _parse([re.sub(r"\$\((\w+)\)", "10.0.0.1", argument) for argument in container["args"]])
    elif command == ["python", "-c"]:
        compile(container["args"][0], "args", "exec")
    else:
        assert command == ["sh", "-euc"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container:
            headrace, *arguments = container[probe]["exec"]["command"]
            assert (headrace, arguments[0]) == ("headrace", "health")
            _parse(arguments)
            assert int(arguments[1].rpartition(":")[2]) in [port["containerPort"] for port in container["ports"]]


@pytest.mark.parametrize("container", SCRIPTS.values(), ids=SCRIPTS)
def test_torchrun_and_headrace_take_what_the_script_gives_them(container: dict[str, Any], tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    checkpoints = tmp_path / "checkpoints"
    env = {**_environment(container), "CHECKPOINTS": str(checkpoints), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [*container["command"], *container["args"]]
    output = subprocess.run(words, env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    found = get_args_parser().parse_args(output.splitlines())
    assert (found.no_python, found.training_script) == (True, "headrace")
    arguments = _parse(found.training_script_args)
    assert arguments.command == "train"
    assert arguments.checkpoint == arguments.resume == checkpoints
    assert checkpoints.is_dir()


@each
def test_settings_are_ones_that_headrace_reads(container: dict[str, Any]) -> None:
    names = {name for name in _environment(container) if name.startswith(("HEADRACE", "OTEL"))}
    text = "".join(path.read_text() for folder in SOURCES for path in (ROOT / folder).rglob("*.py")) if names else ""
    assert {name for name in names if f'"{name}"' not in text} == set()


def test_metrics_of_the_queries_are_served() -> None:
    served = {
        sample for service in (metrics.PREPROCESSOR, metrics.TRAINER) for one in service.collect() for sample in _names(one)
    }
    for query in _queries():
        names = set(re.findall(r"headrace_\w+", query))
        assert names
        assert names <= served


def _names(metric: Any) -> set[str]:
    return {metric.name} | {f"{metric.name}_{part}" for part in ("sum", "count", "bucket") if metric.type == "histogram"}


def _queries() -> list[str]:
    (rule,) = yaml.safe_load((HPA / "adapter-values.yaml").read_text())["rules"]["external"]
    (scaled,) = [document for document in read(KEDA) if document["kind"] == "ScaledObject"]
    return [rule["metricsQuery"], scaled["spec"]["triggers"][0]["metadata"]["query"]]


def test_the_queries_are_one_and_divide_by_the_threads_of_a_preprocessor() -> None:
    first, second = [query.replace(",<<.LabelMatchers>>", "").replace("{<<.LabelMatchers>>}", "") for query in _queries()]
    assert first == second
    arguments = CONTAINERS["base-preprocessor"]["args"]
    assert f") / {arguments[arguments.index('--threads') + 1]} " in first


def test_the_autoscaler_asks_for_the_metric_of_the_rule() -> None:
    (rule,) = yaml.safe_load((HPA / "adapter-values.yaml").read_text())["rules"]["external"]
    (autoscaler,) = [document for document in read(HPA) if document["kind"] == "HorizontalPodAutoscaler"]
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
