"""The loops of examples/integrations as processes, and the losses that they print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.wire import free_ports

HERE, EXAMPLES = Path(__file__).parent, Path(__file__).parents[2] / "examples"
STEPS, EVERY, KILLED_AT = 20, 5, 12
JOB = yaml.safe_load((EXAMPLES / "integrations" / "job.yaml").read_text(encoding="utf-8"))
SHAPE = {
    "sources": [{"path": str(EXAMPLES.parent / JOB["sources"][0]["path"])}],
    **{name: JOB[name] for name in ("steps", "global_batch", "text")},
}
LOSS = re.compile(r"(?:.* )?(?<!validate )step:? +(\d+) +loss:? +([\d.]+)")
Loop = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def loop(calm: Any, tmp_path: Path) -> Loop:
    """(script, job, its launcher) -> the process of a loop that goes on from its newest checkpoint. Two ranks are in one process
    group, and what the first one prints is read."""
    (tmp_path / "torchaudio.py").touch()  # transformers imports it where it finds one, which may be built for another torch

    def start(
        script: str, job: str, *launcher: str, ranks: int = 1, microbatches: int = 2, options: Sequence[str] = ()
    ) -> subprocess.Popen[str]:
        command = [sys.executable, *launcher, str(EXAMPLES / "integrations" / f"{script}.py"), "--endpoint", calm.endpoint]
        command += ["--job", job, "--steps", str(STEPS), "--every", str(EVERY), "--checkpoints", str(tmp_path / job)]
        command += ["--microbatches", str(microbatches), *options]
        if ranks == 2:
            command = ["sh", "-c", 'RANK=1 LOCAL_RANK=1 "$@" > /dev/null & exec "$@"', "both", *command]
        world = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(ranks),
            "ACCELERATE_USE_CPU": "true",  # which `accelerate launch --cpu` sets, as torchrun sets those below
            "TORCHELASTIC_RUN_ID": job,
            "LOCAL_WORLD_SIZE": str(ranks),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_ports(1)[0]),
        }
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(world if launcher or ranks > 1 else {})}
        with (tmp_path / f"{job}.log").open("a") as errors:
            return subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )

    return start


def losses(process: subprocess.Popen[str], log: Path, stop: int | None = None) -> dict[int, float]:
    """Of the steps that a loop prints; it is killed once it has printed `stop`, with the processes that it has started."""
    found: dict[int, float] = {}
    printed: deque[str] = deque(maxlen=60)
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if (match := LOSS.match(line)) is None:
                continue
            found[int(match[1])] = float(match[2])
            if int(match[1]) == stop:
                os.killpg(process.pid, signal.SIGKILL)  # Megatron's savers would keep its output open
    assert process.returncode == 0 or stop is not None, log.read_text()[-4000:] + "".join(printed)
    return found
