"""`headrace demo --kill node`: runs the demo's job on several nodes twice, and kills one of them in the second run."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from headrace.cli.demo.demo_services import start_services
from headrace.cli.demo.display import Display
from headrace.cli.demo.loss_picture import draw_losses
from headrace.cli.run.processors import usable_processors
from headrace.cli.watch.summary import summarise
from headrace.errors import HeadraceError, JobFailedError, UnavailableError
from headrace.jobs_client import JobsClient, state_name
from headrace.local_services import LocalServices
from headrace.processes import Process, ProcessGroup
from headrace.spec import JobSpec

NODES = 5
VICTIM = 1  # the node that is killed
KILL_AT = 1 / 3  # fraction of the steps that are committed before the kill
POLL_S = 0.05
END_S = 10.0  # longest time from the last commit to the end of a node


def run_and_kill_node(spec: JobSpec, num_preprocessors: int, transport: str, out: Path, display: Display) -> dict[str, Any]:
    """Run the job undisturbed and then with a node killed; return the second run's summary, with a picture of both losses.

    Raises HeadraceError where a process that was not killed fails, or the two runs train on different samples.
    """
    topology = spec.topology.model_copy(update={"stages": {"encoder": 1, "llm": 1}})
    nodes = out / "nodes.yaml"
    nodes.write_text(yaml.safe_dump({"nodes": NODES, "max_failures": 1, "units": {"encoder": {}, "llm": {}}}, sort_keys=False))
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as store, ProcessGroup() as group:
        display.say(f"starting 1 reorder service, {num_preprocessors} preprocessors and {NODES} nodes; logs in {out}/")
        services = start_services(group, num_preprocessors, transport, out, Path(store), display)
        with JobsClient(services.endpoint) as client:
            summaries, losses = [], []
            for name, kill in (("undisturbed", False), (spec.name, True)):
                display.say(f"\njob {name}: {f'node-{VICTIM} will be killed' if kill else 'nothing happens to it'}")
                job = client.submit(spec.model_copy(update={"name": name, "topology": topology}))
                run = _Run(client, services, job, display)
                run.train(group, nodes, transport, out, kill=kill)
                summaries.append(summarise(client, job))
                losses.append([entry.loss for entry in client.ledger(job)])
            first, second = summaries
            if first["ledger_sha256"] != second["ledger_sha256"]:
                raise HeadraceError("the two runs trained on different samples: this is a fault of Headrace, please report it")
            furthest = max((abs(a / b - 1) for a, b in zip(*losses, strict=True)), default=0.0)
            display.say(f"the same samples in every step of both runs; losses differ by {furthest:.1e} at most")
            second["picture"] = str(draw_losses(out / "recovery.png", losses[0], losses[1], run.killed_after, run.recovery_note))
        return second


class _Run:
    """One run of the job on its nodes."""

    def __init__(self, client: JobsClient, services: LocalServices, job: str, display: Display) -> None:
        self._client, self._services, self._job, self._display = client, services, job, display
        self.killed_after: int | None = None
        """Number of steps committed before the node was killed; None until then."""
        self.recovery_note = ""
        """Sentence on how training went on after the kill; empty until then."""

    def train(self, group: ProcessGroup, nodes: Path, transport: str, out: Path, *, kill: bool) -> None:
        """Start the nodes and wait until the job is done; if `kill`, kill node VICTIM on the way.

        Raises HeadraceError where the job, or a process that was not killed, fails.
        """
        threads = str(max(1, usable_processors() // NODES))
        arguments = ["train", "--endpoint", self._services.endpoint, "--job", self._job, "--nodes", str(nodes)]
        arguments += ["--transport", transport, "--threads", threads]
        processes = [
            group.add(Process(f"node-{n}", [*arguments, "--node", f"node-{n}"], out / f"{self._job}-node-{n}.log"))
            for n in range(NODES)
        ]
        status = self._client.show(self._job)
        while state_name(status) not in ("done", "failed", "cancelled"):
            self._services.look_after(self._display.say)
            if kill and self.killed_after is None and status.num_steps and status.committed_steps >= KILL_AT * status.num_steps:
                os.kill(processes[VICTIM].pid, signal.SIGKILL)
                self.killed_after, killed_s = status.committed_steps, time.monotonic()
                self._display.say(f"killed node-{VICTIM} after {status.committed_steps} steps")
            if self.killed_after is not None and not self.recovery_note and len(status.recoveries) > 1:
                self.recovery_note = _recovery_note(status.recoveries[-1], time.monotonic() - killed_s)
                self._display.say(self.recovery_note)
            self._check(processes)
            with contextlib.suppress(UnavailableError):  # the service is only busy: its process lives
                status = self._client.show(self._job)
                self._display.update(status)
            time.sleep(POLL_S)
        if status.message:
            raise JobFailedError(status.message)
        for process in processes:
            process.wait(END_S)

    def _check(self, processes: Sequence[Process]) -> None:
        for number, process in enumerate(processes):
            killed = number == VICTIM and self.killed_after is not None
            if process.exit_code() and not killed:
                raise HeadraceError(process.end())


def _recovery_note(recovery: Any, seen_s: float) -> str:
    phases = ", ".join(f"{phase.name} {1e3 * phase.seconds:.0f} ms" for phase in recovery.phases)
    return f"{recovery.change}; the others go on with step {recovery.step}, {seen_s:.2f} s after the kill ({phases})"
