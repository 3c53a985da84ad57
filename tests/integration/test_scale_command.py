"""`headrace scale` beside a job whose trainer waits, and one that needs nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

INTERVAL_S = 1.5
TIMEOUT_S = 60.0


def command(endpoint: str, *arguments: str) -> list[str]:
    interval = ["--interval", str(INTERVAL_S), "--cool-down", "1"]
    return [sys.executable, "-m", "headrace.cli", "scale", "--endpoint", endpoint, *interval, *arguments]


def scale(endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(endpoint, *arguments), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@contextmanager
def scaling(endpoint: str, *arguments: str) -> Iterator[Iterator[str]]:
    """A context in which the command runs, with its lines. It is then interrupted, and ends well."""
    with subprocess.Popen(command(endpoint, *arguments), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield iter(process.stdout.readline, "")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.slow
def test_a_trainer_that_waits_gets_more_and_one_that_has_ended_the_fewest(cluster, spec, tmp_path: Path) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(2)
    idle = scale(cluster.endpoint, "--once")
    assert (idle.returncode, idle.stderr) == (0, "")
    assert 'idle why="there is no job' in idle.stdout
    job = cluster.submit(spec("hungry", epochs=100, image={"max_pixels": 200_000}))
    asked = tmp_path / "asked"
    engine = tmp_path / "engine.py"  # stands for kubectl, sbatch and the like
    engine.write_text(
        "import os, sys\n_, count, file = sys.argv\nopen(file + '~', 'w').write(count)\nos.replace(file + '~', file)\n"
    )
    run = ["--run", f"{sys.executable} {engine} {{count}} {asked}"]

    with cluster.consumed(job), scaling(cluster.endpoint, "--max", "3", *run) as lines:
        line = next(line for line in lines if " decided preprocessors=2 wanted=3 " in line)
        assert 'why="trainers wait ' in line
        assert next(line for line in lines if "connected so far" in line)
        assert asked.read_text() == "3"
    with cluster.client() as client:
        client.cancel(job)
    with scaling(cluster.endpoint, *run) as lines:
        line = next(line for line in lines if "wanted=1 " in line)
        assert "preprocessors=2 wanted=1 busy=0.0 data_wait=0%" in line
        assert next(line for line in lines if "connected so far" in line)
        assert asked.read_text() == "1"
    failed = scale(cluster.endpoint, "--once", "--min", "4", "--run", f"{sys.executable} -c 'raise SystemExit(\"no {{count}}\")'")
    assert failed.returncode == 0
    assert 'status=1 why="no 4"' in failed.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--min", "3", "--max", "2"], "--min 3 and --max 2: take numbers from 0 on, the first no larger than the second"),
        (["--run", "kubectl scale"], "--run has no {count}, for which the number is put in: kubectl scale"),
        (["--run", "echo '{count}"], "--run cannot be read (No closing quotation): echo '{count}"),
        (["--interval", "0"], "--interval must be above 0 seconds, got 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    from headrace.cli.main import main

    assert main(["scale", *arguments]) == 2
    assert capsys.readouterr().err == f"headrace scale: {sentence}\n"
