"""A case: its job on the standing cluster, and what becomes of the nodes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.errors import HeadraceError
from headrace.trainer.pipeline.checkpoint_files import complete_steps, step_folder
from tests.chaos.processes import Footprint
from tests.chaos.standing_cluster import POLL_S
from tests.chaos_trainer.cases import Case
from tests.chaos_trainer.cluster import Cluster, job_spec, shared_memory
from tests.chaos_trainer.faults import Kind
from tests.chaos_trainer.verdict import Trained

TIMEOUT_S = 90.0
DUMP_S = 1.0  # for a node to write where it is
EXIT_UNRECOVERABLE = 3
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "vocab_size": 10_000,
    "tie_word_embeddings": True,
}
"""The configuration of a small model of `transformers`."""
_numbers = itertools.count()


@dataclass(slots=True)
class _Life:
    """Of a node, from a start to its end."""

    node: str
    pid: int
    dies: bool = False
    """As a fault wants it."""
    is_stopped: bool = False
    was_stopped: bool = False


class Run:
    """One case, from the first node's start to the last one's end."""

    def __init__(self, cluster: Cluster, case: Case) -> None:
        self._cluster, self._case = cluster, case
        self.folder = cluster.folder / f"case-{next(_numbers)}"
        self._lives: list[_Life] = []
        self._read: dict[str, int] = {}  # bytes of each node's events
        self._waiting = list(case.starts)
        self._continues: list[tuple[float, _Life, int]] = []
        self._pids: set[int] = set()  # of all processes that have told something
        self._struck_s: list[float] = []
        self._applied = -1
        self._generation = 0
        self._trained = Trained()

    def run(self) -> Trained:
        """What it has come to."""
        trained, before = self._trained, shared_memory()
        try:
            self._begin()
            self._watch()
            self._cluster.make_whole()
            trained.ledger = self._cluster.ledger(self._job)
            trained.errors += self._wrong_ends()
            trained.errors += [f"{name} stays in shared memory" for name in shared_memory() - before if self._is_ours(name)]
            self._read_checkpoint()
        except (HeadraceError, TimeoutError) as err:
            trained.errors.append(str(err))
        finally:
            for life in self._running():
                _signal(life.pid, signal.SIGKILL)
        return trained

    def _is_ours(self, name: str) -> bool:
        """Of one of the nodes: others have their memory there too, and name it by their processes."""
        return not name.startswith("headrace") and not self._pids.isdisjoint(map(int, re.findall(r"\d+", name)))

    def _begin(self) -> None:
        case = self._case
        self.folder.mkdir()
        (self.folder / "case").write_text(f"{case}\n")
        nodes: dict[str, Any] = {"nodes": case.nodes, "max_failures": case.max_failures, "units": {"encoder": {}, "llm": {}}}
        nodes |= {"on_loss": case.on_loss, "gpus_per_node": case.gpus_per_node, "optimizer": {"check_replicas_every": 1}}
        if case.adapted:
            (self.folder / "config.json").write_text(json.dumps(QWEN))
            nodes["model"] = {"llm": str(self.folder)}
        (self.folder / "nodes.yaml").write_text(json.dumps(nodes))
        self._leader = self._cluster.leader()
        self._job = self._cluster.submit(job_spec(self.folder.name, case.steps, case.microbatches))
        for number in range(case.nodes):
            self._start(f"n{number}")

    def _start(self, node: str) -> None:
        arguments = ["--endpoint", self._cluster.endpoint, "--job", self._job, "--node", node, "--threads", "1"]
        if self._case.evaluate_every is not None:
            arguments += ["--evaluate-every", str(self._case.evaluate_every)]
        arguments += ["--nodes", str(self.folder / "nodes.yaml"), "--checkpoint", str(self.folder / "checkpoint")]
        faults = [fault.to_dict() for fault in self._case.faults]
        order = {"node": node, "arguments": arguments, "folder": str(self.folder), "leader": self._leader.popen.pid}
        pid = self._cluster.nursery.fork(**order, faults=faults, environment=dict(os.environ))
        self._lives.append(_Life(node, pid))

    def _running(self) -> list[_Life]:
        return [life for life in self._lives if self._cluster.nursery.code(life.pid) is None]

    def _watch(self) -> None:
        """Until all have ended but those that are stopped for good. Raises TimeoutError."""
        deadline = time.monotonic() + TIMEOUT_S
        while running := [life for life in self._running() if not (life.dies and life.is_stopped)]:
            now_s = time.monotonic()
            if now_s > deadline:
                for pid in self._pids:
                    _signal(pid, signal.SIGUSR1)
                time.sleep(DUMP_S)
                raise TimeoutError(f"{', '.join(life.node for life in running)} did not end: see {self.folder}")
            self._hear_all()
            for act in [act for act in self._waiting if act.step <= self._applied and act.generation <= self._generation]:
                self._waiting.remove(act)
                self._start(act.node)
            for at_s, life, pid in [due for due in self._continues if due[0] <= now_s]:
                self._continues.remove((at_s, life, pid))
                life.is_stopped = False
                _signal(pid, signal.SIGCONT)
            time.sleep(POLL_S)  # polls real processes
        self._hear_all()

    def _hear_all(self) -> None:
        """Take in what every process of every node has told since."""
        for node in {life.node for life in self._lives}:
            for number in range(self._case.gpus_per_node):
                self._hear(node, f"{node}.{number}")

    def _hear(self, node: str, process: str) -> None:
        path = self.folder / f"{process}.events"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read.get(process, 0))
            lines = file.read().rpartition(b"\n")[0]
        if lines:
            self._read[process] = self._read.get(process, 0) + len(lines) + 1
        for line in lines.splitlines():
            self._take(self._life(node), process, json.loads(line))

    def _take(self, life: _Life, node: str, event: dict[str, Any]) -> None:
        """Take in an event of a process, whose name is that of its node with its number."""
        now_s, trained = time.monotonic(), self._trained
        self._pids.add(event["pid"])
        if "attempt" in event:
            trained.attempts[node][event["attempt"]] += 1
        elif "computes" in event:
            trained.computed[node, event["step"]].update(event["computes"])
        elif "applied" in event:
            trained.losses[event["applied"]].append(event["loss"])
            if event["applied"] > self._applied:
                self._applied = event["applied"]
                trained.recovery_s += [now_s - struck_s for struck_s in self._struck_s]
                self._struck_s.clear()
        elif "evaluated_after" in event:
            trained.evaluated[event["evaluated_after"]].append(event["loss"])
        elif "prepared" in event:
            self._generation = max(self._generation, event["prepared"])
            with contextlib.suppress(OSError, KeyError):  # it has gone meanwhile, or is about to
                trained.footprints[node].append(replace(Footprint.of(event["pid"]), memory_kib=event["memory_kib"]))
                trained.abandoned[node].append(event["abandoned"])
        elif "struck" in event:
            fault = self._case.faults[event["struck"]]
            trained.struck.add(event["struck"])
            self._struck_s.append(now_s)
            comes_back = fault.lasts_s is not None and not (self._case.gpus_per_node > 1 and fault.is_loss)
            life.dies = fault.kind == Kind.KILL or (fault.kind == Kind.STOP and not comes_back)
            life.was_stopped = fault.kind == Kind.STOP
            life.is_stopped = life.was_stopped and self._case.gpus_per_node == 1  # else whoever started it ends it
            if fault.lasts_s is not None:
                self._continues.append((now_s + fault.lasts_s, life, event["pid"]))

    def _life(self, node: str) -> _Life:
        return [life for life in self._lives if life.node == node][-1]

    def _wrong_ends(self) -> list[str]:
        wrong = [f"{self._case.faults[n]} never came" for n in set(range(len(self._case.faults))) - self._trained.struck]
        right = 0 if self._case.recovers else EXIT_UNRECOVERABLE
        for life in self._lives:
            code = self._cluster.nursery.code(life.pid)
            if not life.dies and code != right:
                words = (self.folder / f"{life.node}.log").read_text(errors="replace").strip().splitlines()
                wrong.append(f"{life.node} ended with {code}: {words[-1] if words else ''}")
        return wrong

    def _read_checkpoint(self) -> None:
        folder = self.folder / "checkpoint"
        if not self._case.is_whole:
            self._trained.errors += [f"{folder} has a checkpoint of steps {steps}" for steps in [complete_steps(folder)] if steps]
            folder /= "partial"
        if all(life.dies or not life.was_stopped for life in self._lives):  # one that wakes up late may still write
            self._trained.errors += [f"{path} is left" for path in folder.glob("attempt-*")]
        steps = complete_steps(folder)
        if not steps:
            self._trained.errors.append(f"there is no complete checkpoint in {folder}")
            return
        self._trained.steps = steps[-1]
        self._trained.weights = _weights(step_folder(folder, steps[-1]))


def _weights(folder: Path) -> dict[str, npt.NDArray[np.float32]]:
    found: dict[str, npt.NDArray[np.float32]] = {}
    for path in sorted(folder.glob("*.arrow")):
        with pa.ipc.open_file(str(path)) as reader:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                for name, kind, values in zip(batch["name"], batch["kind"], batch["values"], strict=True):
                    if kind.as_py() == "weight":
                        found[name.as_py()] = values.values.to_numpy().astype(np.float32)
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
