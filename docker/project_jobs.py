"""Jobs of the project under test: their specs, and what its trainers and reorder services tell of them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from check_protocol import expect
from engine import Compose, run

EXAMPLE = Path(__file__).parents[1] / "examples" / "job.yaml"


def own_job(path: Path, name: str, *, epochs: int, replicas: int = 2) -> Path:
    """The demo's job under another name, with other epochs and replicas, written to `path`."""
    text = EXAMPLE.read_text(encoding="utf-8")
    fields = {"name: demo": f"name: {name}", "epochs: 1": f"epochs: {epochs}", "replicas: 2": f"replicas: {replicas}"}
    for own, other in fields.items():
        expect(f"how often {own!r} stands in {EXAMPLE}", text.count(f"{own}\n"), 1)
        text = text.replace(f"{own}\n", f"{other}\n")
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)  # the containers' user is another one
    return path


def trained(compose: Compose, limit_s: float) -> dict[str, Any]:
    """The report of the trainer's container, once it has ended with 0."""
    (trainer,) = compose.containers("trainer")
    expect("exit code of the trainer", run(["docker", "wait", trainer], timeout_s=limit_s).strip(), "0")
    lines = run(["docker", "logs", trainer]).splitlines()  # stdout alone, of its last start
    expect("whether the trainer reported, which one that was never started does not", bool(lines), True)
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def summary(report: dict[str, Any]) -> str:
    """A report in a few words."""
    return f"{report['steps']} steps, {report['samples']} samples, ledger {report['ledger_sha256'][:12]}"


def steps_committed(compose: Compose, job: str, service: str = "reorder") -> int:
    """Steps of a job that are committed, as a reorder service tells; 0 before it knows the job."""
    try:
        shown = _asked(compose, service, "job", "show", job, "--format", "json")
    except subprocess.CalledProcessError:
        return 0
    return int(json.loads(shown)["steps"])


def audited(compose: Compose, job: str, service: str = "reorder") -> str:
    """What `headrace audit` finds right in a job's ledger. Raises CalledProcessError where anything is wrong."""
    report = json.loads(_asked(compose, service, "audit", job, "--format", "json"))
    compared = [check["compared"] for check in report["checks"] if check["rule"] in ("once", "whole")]
    return f"{job} ({report['state']}): every sample once; {'; '.join(compared)}"


def _asked(compose: Compose, service: str, *words: str) -> str:
    """What `headrace` prints in a reorder service's container, asked of that service with a token of its own folder."""
    command = ["headrace", *words, "--endpoint", f"{service}:7070", "--cluster-token-file", "/run/headrace/tokens/watch"]
    return run(["docker", "exec", *compose.containers(service), *command])
