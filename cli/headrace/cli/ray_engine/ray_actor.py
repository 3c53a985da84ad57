"""What a Ray actor does: it runs one `headrace preprocessor`, a process that dies with it, and tells how that is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.child_process import with_parent_death_signal
from headrace.cli.ray_engine.ray_options import free_port_of

READ_S = 5.0  # how long the last lines of a process that has ended may take to come


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorState:
    """How the preprocessor of an actor is."""

    node: str
    """Address of the node."""
    endpoint: str
    """Where the preprocessor listens; empty as long as it does not."""
    exit_code: int | None
    """Of the preprocessor; None while it runs."""
    last_words: str
    """The last line that it has written."""


class HostedPreprocessor:
    """The actor. Its methods are called one at a time."""

    def __init__(self, arguments: Sequence[str], listen: str, environment: Mapping[str, str]) -> None:
        """`listen`: empty: a free port of this node's address. `environment`: added to the node's."""
        import ray

        here = ray.get_runtime_context().get_node_id()  # whose address is that of `ray start --node-ip-address`, if it was given
        self._node = next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)
        self._endpoint = self._last_words = ""
        command = [
            sys.executable,
            "-m",
            "headrace.cli",
            *arguments,
            "--listen",
            listen or free_port_of(self._node),
        ]
        self._process = subprocess.Popen(
            with_parent_death_signal(command, signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def state(self) -> ActorState:
        """Return how the preprocessor is."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(READ_S)
        return ActorState(node=self._node, endpoint=self._endpoint, exit_code=code, last_words=self._last_words)

    def stop(self, timeout_s: float) -> None:
        """End the preprocessor in order; after `timeout_s`, kill it."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        """Pass on to Ray's log what the preprocessor writes."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            if line.strip():
                self._last_words = line.strip()
            if not self._endpoint and " listening on " in line:
                self._endpoint = line.split()[-1]
