"""What a test of compose.yaml checks of scaling: preprocessors come and go while a trainer takes their samples.

First `docker compose up --scale` says how many, then `headrace scale --compose` decides. The trainer is a loop of one's own in
the trainer's image. It computes nothing, and so always waits for data; and its job is longer than anybody waits, so that whatever
is done is done in mid-run: at last it is cancelled, and the ledger of what was committed until then is audited.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from check_protocol import Protocol, expect
from engine import Compose, run, wait_until
from project_jobs import audited, own_job

from headrace.errors import EndpointError, UnavailableError
from headrace.jobs_client import JobsClient
from headrace.spec import load_spec_yaml

ROOT = Path(__file__).parents[1]
HEADRACE = Path(sys.executable).parent / "headrace"
JOB, EPOCHS = "scaled", 10_000
BY_HAND = (2, 3, 1)
MOST, INTERVAL_S, COOL_DOWN_S = 4, 5, 15
HELD_CPUS = "0.25"  # of the preprocessor that `headrace scale` finds: others are of use, however fast this machine is
END_S = 60.0
Answer = TypeVar("Answer")
TAKER = f"""
from headrace import trainer
with trainer.connect("reorder:7070", job="{JOB}") as loader:
    for step in loader:
        list(step)
        loader.commit(step)
"""


def check_scaling(protocol: Protocol, compose: Compose, endpoint: str, folder: Path, limit_s: float) -> None:
    """`folder`: with the papers and the token of a client in `client`. `limit_s`: for each change of the number."""
    client = folder / "client"
    token = (client / "token").read_text(encoding="utf-8").strip()
    spec = own_job(folder / f"{JOB}.yaml", JOB, epochs=EPOCHS)
    with contextlib.ExitStack() as stack:
        jobs = _patiently(lambda: stack.enter_context(JobsClient(endpoint, token, client)))
        with _taking(compose, jobs, spec, limit_s):
            with protocol.check("--scale preprocessor=N in mid-run") as notes:
                for count in BY_HAND:
                    compose("up", "--detach", "--no-recreate", "--no-deps", "--scale", f"preprocessor={count}", "preprocessor")
                    notes.append(_taken_from(compose, jobs, count, limit_s))
            if compose.command == ("docker", "compose"):
                check_scale_command(protocol, compose, jobs, folder, limit_s)
            else:
                print("left out headrace scale --compose: it takes `docker compose`, here is docker-compose alone", flush=True)
                _patiently(lambda: jobs.cancel(JOB))
        with protocol.check("the ledger of a job whose preprocessors came and went") as notes:
            notes.append(audited(compose, JOB))
            _patiently(lambda: jobs.delete(JOB))


def check_scale_command(protocol: Protocol, compose: Compose, jobs: JobsClient, folder: Path, limit_s: float) -> None:
    """Of `headrace scale --compose`: more preprocessors for a trainer that waits, and one again when its job is over."""
    run(["docker", "update", "--cpus", HELD_CPUS, *compose.containers("preprocessor")])
    with _scaling(compose, jobs.endpoint, folder / "client", folder / "scale.log") as log:
        with protocol.check("headrace scale --compose in mid-run: more") as notes:
            line, wanted = _decided(log, rf"preprocessors=1 wanted=([2-{MOST}]) ", limit_s)
            notes += [f"decided {line}", _taken_from(compose, jobs, wanted, limit_s)]
        with protocol.check("headrace scale --compose, no job left: one") as notes:
            _patiently(lambda: jobs.cancel(JOB))
            line, _ = _decided(log, r"preprocessors=\d+ wanted=(1) ", limit_s)
            wait_until("one preprocessor", lambda: len(compose.containers("preprocessor")) == 1, timeout_s=limit_s)
            notes += [f"decided {line}", "1 runs"]


@contextlib.contextmanager
def _taking(compose: Compose, jobs: JobsClient, spec: Path, limit_s: float) -> Iterator[None]:
    """A context in which a container takes the job's steps, one of which is committed."""
    _patiently(lambda: jobs.submit(load_spec_yaml(spec)))
    taker = f"{compose.project}-taker"
    compose("run", "--detach", "--no-deps", "--name", taker, "--entrypoint", "python", "trainer", "-c", TAKER)
    try:
        wait_until("a committed step", lambda: _steps(jobs) > 0, timeout_s=limit_s)
        yield
    except BaseException:
        subprocess.run(["docker", "logs", "--tail", "40", taker], stdout=sys.stderr, timeout=END_S)
        raise
    finally:
        run(["docker", "rm", "--force", taker])


def _taken_from(compose: Compose, jobs: JobsClient, count: int, limit_s: float) -> str:
    """Wait until so many preprocessors run and are connected, and for a step that is committed after that; says which."""

    def found() -> tuple[int, int]:
        return len(compose.containers("preprocessor")), len(_patiently(lambda: jobs.show(JOB)).preprocessors)

    wait_until(f"{count} preprocessors to run and be connected", lambda: found() == (count, count), timeout_s=limit_s)
    before = _steps(jobs)
    with_them = f"a step with {count} preprocessors"
    wait_until(with_them, lambda: _steps(jobs) > before and found() == (count, count), timeout_s=limit_s)
    return f"{count} run at step {before}"


def _steps(jobs: JobsClient) -> int:
    return _patiently(lambda: jobs.show(JOB)).committed_steps


def _patiently(call: Callable[[], Answer]) -> Answer:
    """Repeat a call while no service leads: on a busy machine one may lose its lease, and has it again a moment later."""
    deadline = time.monotonic() + END_S
    while True:
        try:
            return call()
        except (EndpointError, UnavailableError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


@contextlib.contextmanager
def _scaling(compose: Compose, endpoint: str, client: Path, log: Path) -> Iterator[Path]:
    """A context in which `headrace scale --compose` runs in the directory of compose.yaml; what it says goes into `log`."""
    command = [str(HEADRACE), "scale", "--compose", "--endpoint", endpoint, "--max", str(MOST)]
    command += ["--interval", str(INTERVAL_S), "--cool-down", str(COOL_DOWN_S)]
    command += ["--tls", str(client), "--cluster-token-file", str(client / "token")]
    env = {**os.environ, **compose.env, "COMPOSE_PROJECT_NAME": compose.project}
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield log
            expect("exit code of `headrace scale`, which goes on", process.poll(), None)
        except BaseException:
            print(log.read_text(encoding="utf-8"), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(timeout=END_S)


def _decided(log: Path, pattern: str, limit_s: float) -> tuple[str, int]:
    """Wait for a decision of this pattern; the words of its line, and the number that the pattern's group has."""

    def found() -> re.Match[str] | None:
        return re.search(rf"^\S+ decided ({pattern}.*)$", log.read_text(encoding="utf-8"), re.MULTILINE)

    wait_until(f"a decision {pattern}", lambda: found() is not None, timeout_s=limit_s)
    match = found()
    assert match is not None, "lines are not taken back"
    return match[1], int(match[2])
