"""The workflow for a public host names targets, files and processors that are there; community files say how to reach us."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def _lines(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_every_target_that_it_makes_exists() -> None:
    made = {target for job in JOBS.values() for line in _lines(job) for target in re.findall(r"make ([a-z-]+)", line)}
    assert made == {"test", "docs", "links", "test-tutorials", "compose-test", "audit", "test-integrations", "test-deploy"}
    assert made - TARGETS == set()


def test_every_part_that_it_names_has_tests_and_every_test_of_deployments_a_part() -> None:
    lines = [line for job in JOBS.values() for line in _lines(job)]
    parts = {part for line in lines for part in re.findall(r"make test-deploy PART=(\w+)", line)}
    assert sum(line.count("make test-deploy") for line in lines) == len(parts)
    files = [path.stem for path in (ROOT / "tests" / "deploy").glob("test_*.py")]
    assert {part for part in parts if not any(part in file for file in files)} == set()
    assert [file for file in files if not any(part in file for part in parts)] == []


def test_it_decides_by_the_same_command_as_every_other_integration() -> None:
    assert _lines(JOBS["test"])[-1] == (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[-1] == "make test"
    processors = {one["processor"]: one["runner"] for one in JOBS["test"]["strategy"]["matrix"]["include"]}
    assert processors == {"x86-64": "ubuntu-24.04", "arm64": "ubuntu-24.04-arm"}


@pytest.mark.parametrize("name", JOBS)
def test_every_job_ends_may_write_nothing_and_has_the_python_of_the_project(name: str) -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "permissions" not in JOBS[name]
    assert 0 < JOBS[name]["timeout-minutes"] <= 60
    least = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"].removeprefix(">=")
    (python,) = [step["with"]["python-version"] for step in JOBS[name]["steps"] if "setup-python" in step.get("uses", "")]
    assert python == least
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@v\d+", step["uses"]) for step in JOBS[name]["steps"] if "uses" in step)


def test_a_mapping_has_no_key_that_yaml_takes_for_something_else() -> None:
    assert set(WORKFLOW) == {"name", True, "permissions", "concurrency", "jobs"}, "`on` is true in YAML 1.1, and a trigger there"
    assert {"push", "pull_request", "schedule"} == WORKFLOW[True].keys()


def test_whoever_has_something_to_say_finds_where() -> None:
    community = ("SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", ".github/pull_request_template.md")
    for path in community:
        assert (ROOT / path).read_text(encoding="utf-8").strip(), path
    for template in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"):
        _, head, body = template.read_text(encoding="utf-8").split("---\n", 2)
        assert yaml.safe_load(head).keys() == {"name", "about", "labels"}
        assert body.strip()
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [name for name in ("CODE_OF_CONDUCT.md", "SECURITY.md") if f"({name})" not in page] == []
