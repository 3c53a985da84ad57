"""Whether native libraries load, each in another process, since a broken one may end the process that loads it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headrace.cli.doctor.diagnosis import Diagnosis, fault, ok, warning

LOAD_TIMEOUT_S = 60.0  # of one process: torch alone takes half a minute from a cold disk on the network
TORCH = ("torch", "torchaudio")
OTHERS = ("Arrow Flight", "simplejpeg", "soundfile", "UCX")
_EXTRA = {"torch": "trainer", "UCX": "rdma"}  # the others are of the extra `preprocessor`
_PACKAGE = {"Arrow Flight": "pyarrow", "UCX": "ucxx-cu13"}

Facts = Mapping[str, Any]
"""What a loaded library says of itself, or the `error` with which it does not load."""


def loaded(names: Sequence[str]) -> dict[str, Facts]:
    """Load libraries in another process, and return the facts of those that are installed. One that ends it gets an error."""
    found: dict[str, Facts] = {}
    left = list(names)
    while left:
        facts, why = _run(left)
        found |= {name: known for name, known in facts.items() if known is not None}
        left = left[len(facts) :]
        if left:
            found[left.pop(0)] = {"error": why}
    return found


def _run(names: Sequence[str]) -> tuple[dict[str, Facts | None], str]:
    """Return the facts of the first libraries, and why the process ended before it had loaded all."""
    command = [sys.executable, "-P", "-m", "headrace.cli.doctor.library_loader", *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False, errors="replace")
        said, why = done.stdout, _end(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as err:
        said = (err.stdout or b"").decode(errors="replace") if isinstance(err.stdout, bytes) else err.stdout or ""
        why = f"it was not loaded after {LOAD_TIMEOUT_S:.0f} s"
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"name"') and line.endswith("}")]
    return {line["name"]: line["facts"] for line in lines}, why


def _end(code: int, errors: str) -> str:
    if code < 0:
        return f"it ends the process that loads it with {signal.Signals(-code).name}"
    return (errors.strip().splitlines() or [f"it ends the process that loads it with exit code {code}"])[-1]


def libraries(names: Sequence[str], found: Mapping[str, Facts]) -> Iterator[Diagnosis]:
    """Tell of each installed library whether it loads. `found`: what `loaded` returns."""
    for name in names:
        if name not in found:
            continue
        facts = found[name]
        if "error" in facts:
            package = _PACKAGE.get(name, name)
            version = "Headrace" if name == "Arrow Flight" else f"headrace[{_EXTRA.get(name, 'preprocessor')}]"
            again = f"`pip install --force-reinstall {package}`, in a version that {version} asks for"
            yield fault(name, f"does not load: {facts['error']}", again)
        elif name == "torchaudio" and not facts["native"]:
            yield ok(name, f"{facts['version']}; its native extension does not load, and Headrace does without it")
        else:
            yield ok(name, " ".join(filter(None, (facts["version"], facts.get("detail")))))


def redis_server() -> Iterator[Diagnosis]:
    """Tell whether there is a redis-server for the embedded store, and whether it runs."""
    from headrace.errors import UserError
    from headrace.reorder_service.store.embedded_redis import server_binary

    name, other = "redis-server", "install Redis, or name one with `headrace reorder --store redis://HOST:PORT`"
    try:
        binary = server_binary()
    except UserError:
        yield warning(name, "there is none, so this machine has no embedded store", other)
        return
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
        trouble = "" if done.returncode == 0 else _end(done.returncode, done.stderr)
    except (OSError, subprocess.TimeoutExpired) as err:
        trouble = str(err)
    if trouble:
        yield fault(name, f"{binary} does not run: {trouble}", other)
    else:
        version = next((word[2:] for word in done.stdout.split() if word.startswith("v=")), "of an unknown version")
        yield ok(name, f"{version}, for the embedded store")
