"""What a test of compose.yaml checks of its profile gpu: that it trains, where containers get a GPU, else its form alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from check_protocol import Protocol, expect
from engine import BUILD_S, Compose, run
from project_jobs import audited, own_job

IMAGE = "headrace-reorder:latest"  # any that is here: the engine puts the driver's programs into it


def check_gpu(protocol: Protocol, compose: Compose, folder: Path, limit_s: float) -> None:
    """Its line says which of both was checked, and in the engine's words why a GPU cannot be had."""
    count, why = gpus_of_containers()
    if not count:
        with protocol.check("profile gpu: its form ONLY, nothing was run") as notes:
            service: dict[str, Any] = yaml.safe_load(compose("--profile", "gpu", "config"))["services"]["trainer-gpu"]
            (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
            expect("what it asks the engine for", (devices["driver"], devices["capabilities"]), ("nvidia", ["gpu"]))
            expect("its program", service["entrypoint"][0], "torchrun")
            notes.append(f"no GPU for a container: {why}")
        return
    with protocol.check(f"profile gpu: RUN, a rank on each of {count} GPU(s)") as notes:
        job = own_job(folder / "on-gpus.yaml", "on-gpus", epochs=1, replicas=count)
        beside = Compose(command=compose.command, project=compose.project, env={**compose.env, "HEADRACE_JOB": str(job)})
        beside("--profile", "gpu", "build", "trainer-gpu", timeout_s=BUILD_S)
        beside("--profile", "gpu", "up", "--detach", "--no-deps", "trainer-gpu", timeout_s=limit_s)
        (trainer,) = beside.containers("trainer-gpu")
        expect("exit code of the trainer", run(["docker", "wait", trainer], timeout_s=limit_s).strip(), "0")
        notes.append(audited(beside, "on-gpus"))


def gpus_of_containers() -> tuple[int, str]:
    """How many GPUs a container gets; where that is none, the engine's reason as well."""
    command = ["docker", "run", "--rm", "--gpus", "all", "--entrypoint", "nvidia-smi", IMAGE, "-L"]
    try:
        found = re.findall(r"^GPU \d+:", run(command), re.MULTILINE)
    except subprocess.CalledProcessError as err:
        lines = [line for line in err.stderr.splitlines() if line.strip()]
        return 0, lines[0] if lines else f"`{' '.join(command)}` ended with {err.returncode}"
    return len(found), "" if found else "nvidia-smi lists none"
