"""What `make compose-test` reads and writes, as far as it takes no engine: jobs, decisions of `headrace scale`, GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headrace.cli.scale.scaling_loop import say
from headrace.spec import load_spec_yaml

DOCKER = Path(__file__).parents[3] / "docker"
REFUSAL = 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].'


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType, ModuleType]]:
    """check_scaling, check_gpu and project_jobs, which are imported as from their own folder."""
    monkeypatch.syspath_prepend(DOCKER)
    before = set(sys.modules)
    import check_gpu
    import check_scaling
    import project_jobs

    yield check_scaling, check_gpu, project_jobs
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(DOCKER)):
            del sys.modules[name]


def test_a_job_of_its_own_differs_from_the_demo_s_in_what_was_asked_for(checks, tmp_path: Path) -> None:
    *_, project_jobs = checks
    demo, own = (
        load_spec_yaml(path)
        for path in (project_jobs.EXAMPLE, project_jobs.own_job(tmp_path / "own.yaml", "own", epochs=3, replicas=4))
    )
    assert (own.name, own.epochs, own.topology.replicas) == ("own", 3, 4)
    assert {name for name, value in own if value != getattr(demo, name)} == {"name", "epochs", "topology"}


def test_a_decision_is_found_among_the_lines_of_headrace_scale(
    checks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling, *_ = checks
    say("idle", why="there is no job, and none tells of preprocessors")
    say("decided", preprocessors=1, wanted=1, busy="0.2", data_wait="0%", why="the trainers begin, 4 steps planned")
    say("decided", preprocessors=1, wanted=4, busy="1.0", data_wait="97%", why="trainers wait 97% of their time for data: ...")
    log = tmp_path / "scale.log"
    log.write_text(capsys.readouterr().out)
    line, wanted = scaling._decided(log, r"preprocessors=1 wanted=([2-4]) ", 0.0)
    assert wanted == 4
    assert line.startswith("preprocessors=1 wanted=4 busy=1.0 data_wait=97% why=")
    with pytest.raises(TimeoutError, match="a decision"):
        scaling._decided(log, r"preprocessors=\d+ wanted=(8) ", 0.0)


def test_the_trainer_of_the_scaling_check_is_python(checks) -> None:
    scaling, *_ = checks
    compile(scaling.TAKER, "taker", "exec")


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'; echo 'GPU 1: NVIDIA H200 (UUID: GPU-2)'", (2, "")),
        ("echo nothing", (0, "nvidia-smi lists none")),
        (f"echo '{REFUSAL}' >&2; echo more >&2; exit 125", (0, REFUSAL)),
    ],
    ids=["two", "none", "refused"],
)
def test_gpus_are_those_that_the_engine_gives_a_container_else_it_says_why_not(
    checks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: tuple[int, str]
) -> None:
    """The engine is a stand-in here, which answers as one does."""
    _, gpu, _ = checks
    engine = tmp_path / "docker"
    engine.write_text(f"#!/bin/sh\n{script}\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu.gpus_of_containers() == found
