"""A Slurm of this machine alone: munged, slurmctld and a slurmd for each of several nodes, all in one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.wire import free_ports

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
START_S = 120.0
_CPUS, _MEMORY_MIB = 4, 4096  # of a node, whatever the machine has


def lacking() -> str:
    """Say why no cluster can be had here, or nothing."""
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    return f"{', '.join(missing)} not installed" if missing else "" if os.geteuid() == 0 else "takes root"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """Where its configuration is."""

    env: dict[str, str]

    def __call__(self, *command: str, cwd: Path | None = None, **env: str) -> str:
        """Run one of Slurm's commands and return what it prints. Raises CalledProcessError where it fails."""
        environment = {**os.environ, **self.env, **env}
        done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    def state_of(self, job: str) -> str:
        """Return the state of a job, or of the first part of one of several. Raises CalledProcessError where there is none."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                return self("scontrol", "--oneliner", "show", "job", job).partition("JobState=")[2].split()[0]
            except subprocess.CalledProcessError as err:
                if err.returncode > 0 or time.monotonic() > deadline:
                    raise
            time.sleep(0.5)  # SIGPIPE: the controller was too busy to answer


@contextlib.contextmanager
def running_slurm(folder: Path, num_nodes: int) -> Iterator[SlurmCluster]:
    """Start a cluster and wait until its nodes are idle; end it and its jobs."""
    key, munge_socket, configuration = folder / "munge.key", folder / "munge.socket", folder / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    folder.chmod(0o755)
    control, *ports = free_ports(num_nodes + 1)
    nodes = [f"node{number}" for number in range(1, num_nodes + 1)]
    host = socket.gethostname().partition(".")[0]
    lines = [
        "ClusterName=tests",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={control}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge_socket}",
        "CredType=cred/munge",
        f"StateSaveLocation={folder / 'state'}",
        f"SlurmdSpoolDir={folder / 'spool'}-%n",
        f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
        f"SlurmdPidFile={folder / 'slurmd'}-%n.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=sched_interval=1,bf_interval=1",
        "ReturnToService=2",
        "MpiDefault=none",
        "KillWait=20",
        *(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS} RealMemory={_MEMORY_MIB}"
            for node, port in zip(nodes, ports, strict=True)
        ),
        f"PartitionName=all Nodes={','.join(nodes)} Default=YES State=UP OverSubscribe=NO",
    ]
    configuration.write_text("\n".join(lines) + "\n")
    cluster = SlurmCluster(env={"SLURM_CONF": str(configuration)})
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}"]
    munged += [
        f"--pid-file={folder / 'munged.pid'}",
        f"--log-file={folder / 'munged.log'}",
        f"--seed-file={folder / 'munged.seed'}",
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_process(munged, folder / "munged.out", cluster))
        await_that(munge_socket.exists, "munged's socket")
        stack.enter_context(_process(["slurmctld", "-D"], folder / "slurmctld.log", cluster))
        for node in nodes:
            stack.enter_context(_process(["slurmd", "-D", "-N", node], folder / f"{node}.log", cluster))
        stack.callback(cluster, "scancel", "--user", "root")
        await_that(lambda: _idle(cluster) == num_nodes, "all nodes idle")
        yield cluster


def await_that(holds: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
    """Wait until something holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.5)


def _idle(cluster: SlurmCluster) -> int:
    try:
        return cluster("sinfo", "--noheader", "--Node", "--format=%t").split().count("idle")
    except subprocess.CalledProcessError:
        return 0


@contextlib.contextmanager
def _process(command: list[str], log: Path, cluster: SlurmCluster) -> Iterator[None]:
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **cluster.env}) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
