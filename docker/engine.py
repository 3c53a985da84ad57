"""A container engine, a compose command and base images: found where they are, started or built where they are not."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ENGINE_START_S = 60.0
PULL_S = 120.0
BUILD_S = 1800.0
FOLDER = Path(__file__).parent


class UnavailableError(Exception):
    """Something the containers need is not here and cannot be had. The message says what it is and what to do."""


def run(command: Sequence[str], *, timeout_s: float = 60.0, env: Mapping[str, str] | None = None) -> str:
    """The command's stdout. Raises CalledProcessError (which holds stderr too) and TimeoutExpired."""
    return subprocess.run(command, check=True, text=True, capture_output=True, timeout=timeout_s, env=env).stdout


def succeeds(command: Sequence[str], *, timeout_s: float = 60.0) -> bool:
    """Whether the command can be run and ends with 0 in time."""
    try:
        run(command, timeout_s=timeout_s)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def wait_until(what: str, condition: Callable[[], bool], *, timeout_s: float) -> None:
    """Ask twice a second until the condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.5)


@contextlib.contextmanager
def running_engine() -> Iterator[str]:
    """An engine that answers as long as the context lasts; the value says whose it is. Raises UnavailableError."""
    if shutil.which("docker") is None:
        raise UnavailableError("there is no docker command: install Docker")
    if succeeds(["docker", "info"]):
        yield "found running"
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        raise UnavailableError("no engine answers `docker info`: start one, or run this as root where dockerd is installed")
    daemon = subprocess.Popen(["dockerd"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until("dockerd to answer", lambda: succeeds(["docker", "info"]), timeout_s=ENGINE_START_S)
        yield "started, stopped at the end"
    finally:
        daemon.terminate()
        daemon.wait(timeout=ENGINE_START_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An official image and the command that builds a stand-in for it where no registry is reached."""

    name: str
    stand_in: str
    build: tuple[str, ...]

    def is_here(self) -> bool:
        """Whether the official image is here, after it was pulled where it can be."""
        return succeeds(["docker", "image", "inspect", self.name]) or succeeds(["docker", "pull", self.name], timeout_s=PULL_S)

    def obtain(self) -> str:
        """The name of the one that is here in the end: official if it is here or can be pulled, else the stand-in."""
        if self.is_here():
            return self.name
        if not succeeds(["docker", "image", "inspect", self.stand_in]):
            run(self.build, timeout_s=BUILD_S)
        return self.stand_in


BASE = Image(
    name="python:3.11-slim",
    stand_in="headrace-base:latest",
    build=(str(FOLDER / "base_image.sh"), "headrace-base:latest"),
)


def debian_image(name: str, package: str, base: str) -> Image:
    """An official image whose stand-in is made from `base`, which must be Debian, by docker/PACKAGE.Dockerfile."""
    stand_in = f"headrace-{package}:latest"
    recipe = ("--build-arg", f"BASE={base}", "--file", str(FOLDER / f"{package}.Dockerfile"), str(FOLDER))
    return Image(name=name, stand_in=stand_in, build=("docker", "build", "--tag", stand_in, *recipe))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compose:
    """One project of `compose.yaml`. Containers, networks and volumes carry its name."""

    command: tuple[str, ...]
    project: str
    env: Mapping[str, str]

    def __call__(self, *arguments: str, timeout_s: float = 300.0) -> str:
        file = str(FOLDER.parent / "compose.yaml")
        command = [*self.command, "--project-name", self.project, "--file", file, *arguments]
        return run(command, timeout_s=timeout_s, env={**os.environ, **self.env})

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers, ended ones too."""
        return self._labelled(["docker", "ps", "--all"], f"com.docker.compose.service={service}")

    def healthy(self, service: str) -> int:
        """How many of a service's containers pass their health check."""
        states = [
            run(["docker", "inspect", "--format", "{{.State.Health.Status}}", one]).strip() for one in self.containers(service)
        ]
        return states.count("healthy")

    def remains(self) -> list[str]:
        """Ids of everything of the project that is still there."""
        kinds = (["docker", "ps", "--all"], ["docker", "network", "ls"], ["docker", "volume", "ls"])
        return [one for kind in kinds for one in self._labelled(kind)]

    def copy(self, service: str, path: str, to: Path) -> None:
        """Copy a file or folder out of a service's container, which may have ended."""
        run(["docker", "cp", f"{self.containers(service)[0]}:{path}", str(to)])

    def _labelled(self, command: Sequence[str], *labels: str) -> list[str]:
        wanted = (f"com.docker.compose.project={self.project}", *labels)
        return run([*command, "--quiet", *(f"--filter=label={label}" for label in wanted)]).split()


def compose_command() -> tuple[str, ...]:
    """`docker compose` where it is there, else `docker-compose`. Raises UnavailableError."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if succeeds([*command, "version"]):
            return command
    raise UnavailableError("neither `docker compose` nor `docker-compose` can be run: install Docker Compose")
