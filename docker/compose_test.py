"""Prove compose.yaml on a real engine: `make compose-test`.

`headrace demo` on this machine, to know how fast it is at present. Up with two preprocessors until the demo trainer ends, in at
most three times as long; up again, which trains nothing; four preprocessors and a trainer outside the containers; the same
batches each time; down, and nothing left. Prints what passed, one line each; the exit code is 1 if anything did not.

Where no image registry is reached, stand-ins for the two official images are built from Debian's packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import (
    BASE,
    BUILD_S,
    Compose,
    UnavailableError,
    compose_command,
    redis_image,
    run,
    running_engine,
    succeeds,
    wait_until,
)

from headrace.processes import free_port

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
WHEELS = ROOT / "docker" / "wheels"
HOST_S = 1800.0  # of `headrace demo`, which takes under half a minute on two free cores
MAX_RATIO = 3.0  # of the demo in containers over that on the host, from first to last process
PATIENCE = 10.0  # times as long as on the host, until it is given up
CONFINED = ("ReadonlyRootfs", "CapDrop", "SecurityOpt", "Memory", "PidsLimit")


class CheckError(Exception):
    """Something did not come out as it has to. The message gives both sides."""


@dataclass(slots=True)
class Protocol:
    """What was checked, with its outcome and seconds."""

    failures: int = 0
    ledgers: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def check(self, what: str) -> Iterator[list[str]]:
        """Print one line about the block; notes put into the value stand behind it. Ends the test if the block raises."""
        notes: list[str] = []
        start = time.monotonic()
        try:
            yield notes
        except BaseException:
            self.failures += 1
            self._line("FAILED", what, start, notes)
            raise
        self._line("ok", what, start, notes)

    def _line(self, outcome: str, what: str, start: float, notes: list[str]) -> None:
        print(f"{outcome:<7} {what:<58} {time.monotonic() - start:6.1f} s  {'; '.join(notes)}", flush=True)


def main() -> int:
    """Run all checks in order; the first that fails is the last."""
    protocol = Protocol()
    try:
        with running_engine() as whose, tempfile.TemporaryDirectory() as folder:
            print(f"engine {whose}; {' '.join(compose_command())}", flush=True)
            check_all(protocol, Path(folder))
    except UnavailableError as err:
        print(f"cannot test: {err}", file=sys.stderr)
        return 1
    except (CheckError, TimeoutError, subprocess.TimeoutExpired) as err:
        print(err, file=sys.stderr)
    except subprocess.CalledProcessError as err:
        print(f"{err}\n{err.stdout[-4000:]}\n{err.stderr[-4000:]}", file=sys.stderr)
    return min(protocol.failures, 1)


def check_all(protocol: Protocol, folder: Path) -> None:
    """Images, then the project up, scaled, compared and down again."""
    with protocol.check("base images") as notes:
        base = BASE.obtain()
        redis = redis_image(base).obtain()
        notes += [base, redis]
    with protocol.check("torch for the image") as notes:
        notes.append(fetch_cpu_torch())
    for name in ("HEADRACE_CLUSTER_TOKEN", "HEADRACE_CLUSTER_TOKEN_FILE"):
        os.environ.pop(name, None)  # the project makes its own
    endpoint = f"127.0.0.1:{free_port()}"
    compose = Compose(
        command=compose_command(),
        project="headrace-compose-test",
        env={
            "HEADRACE_BASE_IMAGE": base,
            "HEADRACE_REDIS_IMAGE": redis,
            "HEADRACE_PUBLISH": endpoint,
            "HEADRACE_FORMAT": "json",
        },
    )
    compose("down", "--volumes", "--remove-orphans")  # of a test that was killed
    try:
        check_running(protocol, compose, endpoint, folder)
    except BaseException:
        print(compose("logs", "--no-color", "--tail=40"), file=sys.stderr)
        raise
    finally:
        with protocol.check("down, nothing left") as notes:
            compose("down", "--volumes")
            expect("remains", compose.remains(), [])


def check_running(protocol: Protocol, compose: Compose, endpoint: str, folder: Path) -> None:
    """The checks between `up` and `down`."""
    with protocol.check("images build"):
        compose("build", timeout_s=BUILD_S)
    with protocol.check("headrace demo on the host") as notes:
        command = [str(BIN / "headrace"), "demo", "--format", "json", "--out", str(folder / "demo")]
        start = time.monotonic()
        demo = json.loads(run(command, timeout_s=HOST_S))
        host_s = time.monotonic() - start
        notes.append(summary(demo))
    limit_s = PATIENCE * host_s
    with protocol.check("up: the demo trainer ends with exit code 0") as notes:
        start = time.monotonic()
        compose("up", "--detach", timeout_s=limit_s)
        (trainer,) = compose.containers("trainer")
        expect("exit code", run(["docker", "wait", trainer], timeout_s=limit_s).strip(), "0")
        ratio = (time.monotonic() - start) / host_s
        inside = json.loads(run(["docker", "logs", trainer]))  # stdout alone: logs go to stderr
        notes += [summary(inside), f"{ratio:.1f} times as long as on the host"]
    with protocol.check(f"at most {MAX_RATIO:g} times as long as on the host"):
        expect(f"ratio {ratio:.2f} is at most {MAX_RATIO:g}", ratio <= MAX_RATIO, True)
    with protocol.check("up again: the trainer says that nothing is left to train"):
        compose("up", "--detach", timeout_s=limit_s)
        expect("exit code", run(["docker", "wait", trainer], timeout_s=limit_s).strip(), "0")
        expect("its words", "was done before: nothing is left to train" in compose("logs", "trainer"), True)
    with protocol.check("confined: nothing to write to, no capability, limits"):
        for service in ("redis", "reorder", "preprocessor", "trainer"):
            for one in compose.containers(service):
                (container,) = json.loads(run(["docker", "inspect", one]))
                lacking = [name for name in CONFINED if not container["HostConfig"][name]]
                expect(f"what {service} is not confined by", lacking, [])
    with protocol.check("a container's quota is what its threads follow"):
        code = "from headrace.cli.run.processors import usable_processors; print(usable_processors())"
        command = ["docker", "run", "--rm", "--cpus", "1", "--entrypoint", "python", "headrace:latest", "-c", code]
        expect("processors of --cpus 1", run(command).strip(), "1")
    with protocol.check("payload came through shared memory"):
        expect("transport=shared_memory in the trainer's log", "transport=shared_memory" in compose("logs", "trainer"), True)
    with protocol.check("two preprocessors, no process as root"):
        expect("preprocessors", len(compose.containers("preprocessor")), 2)
        for service in ("reorder", "preprocessor"):
            users = [run(["docker", "exec", one, "id", "-u"]).strip() for one in compose.containers(service)]
            expect(f"users of {service}", "0" in users, False)
    with protocol.check("--scale preprocessor=4: four become healthy"):
        compose("up", "--detach", "--scale", "preprocessor=4", "redis", "reorder", "preprocessor")
        wait_until("4 healthy preprocessors", lambda: compose.healthy("preprocessor") == 4, timeout_s=limit_s)
    with protocol.check("a stranger outside the containers is refused"):
        stranger = [str(BIN / "headrace"), "job", "list", "--endpoint", endpoint]
        expect("served without the cluster's token", succeeds(stranger), False)
    (reorder,) = compose.containers("reorder")
    os.environ["HEADRACE_CLUSTER_TOKEN"] = run(["docker", "exec", reorder, "cat", "/run/headrace/token"]).strip()
    with protocol.check("a trainer outside the containers") as notes:
        spec = renamed_job(folder / "job.yaml")
        command = [str(BIN / "headrace"), "train", "--endpoint", endpoint, "--submit", str(spec), "--format", "json"]
        outside = json.loads(run(command, timeout_s=limit_s))
        notes.append(summary(outside))
    with protocol.check("the same ledger everywhere"):
        expect("ledgers", [inside["ledger_sha256"], outside["ledger_sha256"]], [demo["ledger_sha256"]] * 2)


def expect(what: str, found: object, wanted: object) -> None:
    """Raise CheckError unless both are equal."""
    if found != wanted:
        raise CheckError(f"{what}: found {found}, wanted {wanted}")


def summary(report: dict[str, Any]) -> str:
    """A report in a few words."""
    return f"{report['steps']} steps, {report['samples']} samples, ledger {report['ledger_sha256'][:12]}"


def renamed_job(path: Path) -> Path:
    """The demo's job under another name, written to `path`."""
    text = (ROOT / "examples" / "job.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("name: demo\n", "name: demo-from-outside\n", 1), encoding="utf-8")
    return path


def fetch_cpu_torch() -> str:
    """Put torch's CPU wheel into docker/wheels where pip finds one here; says what the image gets."""
    if any(WHEELS.glob("torch-*+cpu-*.whl")):
        return "CPU wheel is here"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (pin,) = (needed for needed in project["optional-dependencies"]["trainer"] if needed.startswith("torch>="))
    pip = [sys.executable, "-m", "pip", "--quiet"]
    report = json.loads(
        run([*pip, "install", "--dry-run", "--ignore-installed", "--no-deps", "--report=-", pin], timeout_s=BUILD_S)
    )
    version = report["install"][0]["metadata"]["version"]
    if not version.endswith("+cpu"):
        return f"{version}: no CPU wheel here, the image takes the index's build"
    run([*pip, "download", "--no-deps", f"--dest={WHEELS}", f"torch=={version}"], timeout_s=BUILD_S)
    return f"{version} into docker/wheels"


if __name__ == "__main__":
    sys.exit(main())
