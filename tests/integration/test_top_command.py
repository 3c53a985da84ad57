"""`headrace top` beside a job that runs."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest

from headrace.cli.watch.top import Watch
from headrace.errors import UnavailableError

pytestmark = pytest.mark.integration

INTERVAL_S = 0.3


def command(cluster, *arguments: str) -> list[str]:
    interval = ["--interval", str(INTERVAL_S)]
    return [sys.executable, "-m", "headrace.cli", "top", "--endpoint", cluster.endpoint, *interval, *arguments]


@pytest.mark.slow
def test_once_tells_of_a_running_job(cluster, spec) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(2)
    job = cluster.submit(spec("watched", epochs=100))
    with cluster.consumed(job):
        done = subprocess.run(
            command(cluster, "--once", "--format", "json"), capture_output=True, text=True, timeout=60, check=False
        )
        plain = subprocess.run(command(cluster, job), capture_output=True, text=True, timeout=60, check=False)
        lines = subprocess.run(command(cluster, "--plain", "--once"), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(done.stdout)
    assert seen["service"]["leader"] == cluster.endpoint
    assert seen["service"]["up_s"] > INTERVAL_S
    [watched] = seen["jobs"]
    assert (watched["job"], watched["state"], watched["generation"]) == ("watched", "running", 1)
    assert 3 <= watched["committed_steps"] < watched["num_steps"]
    assert watched["samples_per_s"] == pytest.approx(16 * watched["steps_per_s"])
    assert 0 < watched["data_wait_fraction"] <= 1
    assert watched["bottleneck"]["sentence"]
    assert [(source["share"], source["samples_share"]) for source in watched["sources"]] == [(1.0, 1.0)]
    assert watched["ranks"][0]["next_step"] >= watched["committed_steps"]
    assert len(seen["preprocessors"]) == 2
    assert all(member["store_budget_bytes"] > 0 for member in seen["preprocessors"])
    # in a pipe it is printed once, in words
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "job watched running" in plain.stdout
    assert "\x1b" not in plain.stdout
    assert (lines.returncode, lines.stderr) == (0, "")
    kinds = [" ".join(line.split()[:1]) for line in lines.stdout.splitlines()]
    assert kinds == ["service", "job", "rank", "preprocessor", "preprocessor"]
    assert "\nrank watched/0 connected next=" in lines.stdout


def test_ctrl_c_ends_the_live_view(cluster) -> None:
    cluster.start_reorder()
    ours, theirs = pty.openpty()
    with subprocess.Popen(command(cluster), stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        reader = threading.Thread(target=drained, args=(ours,))
        try:
            said = b""
            while b"no jobs" not in said:
                said += os.read(ours, 4096)
            process.send_signal(signal.SIGINT)
            reader.start()
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    reader.join()
    os.close(ours)
    assert (process.returncode, err) == (0, b"")


def drained(terminal: int) -> None:
    """Read to the end, which a terminal that nobody holds any more tells by an error."""
    try:
        while os.read(terminal, 4096):
            pass
    except OSError:
        return


@pytest.mark.slow
def test_a_change_of_the_leader_is_followed(cluster, spec, store) -> None:
    leader, _ = cluster.start_reorders(store.url)
    job = cluster.submit(spec("watched", steps=4))
    first, second = cluster.endpoint.split(",")
    deadline = time.monotonic() + 60.0
    with cluster.client() as client:
        watch = Watch(client, job)
        watch.look()
        assert watch.figures()["service"]["leader"] == first
        os.kill(leader.pid, signal.SIGKILL)
        while watch.figures()["service"]["leader"] == first:
            assert time.monotonic() < deadline
            with contextlib.suppress(UnavailableError):
                watch.look()
    assert watch.figures()["service"]["leader"] == second
    assert watch.figures()["jobs"][0]["bottleneck"]["sentence"] == "no preprocessor is connected"


@pytest.mark.slow
def test_no_service_is_one_sentence(cluster) -> None:
    cluster.endpoint = "127.0.0.1:1"
    done = subprocess.run(command(cluster, "--once"), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("headrace top: no reorder service answers at 127.0.0.1:1")
