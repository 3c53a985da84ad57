"""The files that start the trainers of a placement: by torchrun, as a job of Slurm, and as a JobSet of Kubernetes.

The last two are those of `deploy/`, with the placement's numbers of nodes and processes and its trainers' command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.deployment_files import deployment_file

TORCHRUN, SLURM, JOBSET, KUSTOMIZATION = "torchrun.sh", "headrace.sbatch", "jobset.yaml", "kustomization.yaml"
_JOBSET_FOLDER = "kubernetes/overlays/jobset"
_MOUNTED = "/etc/headrace"
"""Where the pods of the JobSet have the files of its config map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is started on which nodes."""

    title: str
    """The model and the cluster, in words."""
    job: str
    """Name of the job that is trained."""
    spec: str
    """Name of the file of its spec, beside the files that are written."""
    processes: int
    per_node: int
    """Processes of a node; the last node has what is left."""
    precision: str
    """Of the matrix products, as `headrace train` takes it."""
    topology: str = ""
    """Name of the file of the trainers' topology; empty where the job's spec says all of it."""
    has_own_loop: bool = False
    """Whether the trainers are a loop of the user's, not `headrace train`."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.processes // self.per_node)

    @property
    def on_last(self) -> int:
        """Processes of the last node."""
        return self.processes - (self.nodes - 1) * self.per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommands:
    """The commands that go with the files, each for one way to start the trainers."""

    torchrun: str
    """For every node, beside a reorder service and preprocessors."""
    slurm: str
    """Starts these too."""
    kubernetes: str
    """Beside the services of `deploy/kubernetes/base`."""


def write_launch_files(out: Path, launch: Launch) -> tuple[tuple[Path, ...], LaunchCommands]:
    """Write the files into a folder, beside the job's spec and the topology.

    Raises UserError where `deploy/` is not installed.
    """
    texts = {
        TORCHRUN: torchrun_script(launch),
        SLURM: slurm_script(launch),
        JOBSET: jobset(launch),
        KUSTOMIZATION: kustomization(launch),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    where = [] if launch.nodes == 1 else ["MASTER_ADDR=FIRST_NODE", "NODE_RANK=0"]
    loop = ["LOOP=YOUR_LOOP.py"] if launch.has_own_loop else []
    exported = ",".join(["ALL", "HEADRACE_DATA=FOLDER", *(f"HEADRACE_{word}" for word in loop)])
    commands = LaunchCommands(
        torchrun=shlex.join([*where, *loop, "ENDPOINT=SERVICE:7070", "bash", str(out / TORCHRUN)]),
        slurm=shlex.join(["sbatch", f"--export={exported}", str(out / SLURM), str(out / launch.spec)]),
        kubernetes=shlex.join(["kubectl", "--namespace", "headrace", "apply", "--server-side", "--kustomize", str(out)]),
    )
    return tuple(out / name for name in texts), commands


def torchrun_script(launch: Launch) -> str:
    """Return the script that starts the ranks of one node, with the numbers of the placement."""
    several, last = launch.nodes > 1, launch.nodes - 1
    where = "MASTER_ADDR=FIRST_NODE NODE_RANK=0 " if several else ""
    loop = "LOOP=YOUR_LOOP.py " if launch.has_own_loop else ""
    spread = f"{launch.per_node} on each of {launch.nodes} nodes" if several else "on one node"
    spread += "" if launch.on_last == launch.per_node else f", {launch.on_last} on the last"
    called = (
        f"# Call it on every node, with a NODE_RANK from 0 to {last} of its own; FIRST_NODE is the one of 0.\n" if several else ""
    )
    named = ['"${ENDPOINT:?names no reorder service, as HOST:PORT}"']
    named += ['"${MASTER_ADDR:?names no first node}" "${NODE_RANK:?does not say which node this is}"'] if several else []
    named += ['"${LOOP:?names no script of a training loop}"'] if launch.has_own_loop else []
    return f"""\
#!/bin/bash
# {launch.title}: {launch.processes} processes, {spread}; by headrace orchestrate.
#
#   {where}{loop}ENDPOINT=SERVICE:7070 bash {TORCHRUN}
#
{called}# SERVICE is a reorder service, beside which preprocessors run. Words behind the script's name go to the trainers.
set -euo pipefail
: {" ".join(named)}
here=$(dirname "$(realpath "$0")")
if [ "${{NODE_RANK:-0}}" = 0 ]; then # ranks start when all nodes are there, and so after this
    headrace job submit "$here/{launch.spec}" --endpoint "$ENDPOINT"
fi
processes={_processes(launch, "NODE_RANK")}
exec torchrun --nnodes {launch.nodes} --node-rank "${{NODE_RANK:-0}}" --nproc-per-node "$processes" \\
    --master-addr "${{MASTER_ADDR:-127.0.0.1}}" --master-port "${{MASTER_PORT:-29500}}" --no-python \\
    {_trainer(launch, "$ENDPOINT", launch.job, "$here", "$LOOP")} "$@"
"""


def slurm_script(launch: Launch) -> str:
    """Return `deploy/slurm/headrace.sbatch` for the placement. Its services have the nodes that they have there."""
    trainer = _trainer(launch, "$endpoint", "$job", '$(dirname "$spec")', "${HEADRACE_LOOP:?names no script of a loop}")
    changes = {
        r"deploy/slurm/(headrace\.sbatch) job\.yaml": rf"\1 {launch.spec}",
        r"(usage: sbatch headrace\.sbatch) job\.yaml": rf"\1 {launch.spec}",
        r"--nodes=\d+ ([^\n]*) --gpus-per-node=\d+": rf"--nodes={launch.nodes} \1 --gpus-per-node={launch.per_node}",
        r'--nproc-per-node "\$\{SLURM_GPUS_ON_NODE:-1\}"': f"--nproc-per-node {_processes(launch, 'SLURM_NODEID')}",
        r'\(headrace train --endpoint "\$endpoint" --job "\$job"\)': f"({trainer})",
    }
    return _changed(deployment_file("slurm/headrace.sbatch"), changes)


def jobset(launch: Launch) -> str:
    """Return the JobSet of `deploy/kubernetes/overlays/jobset` for the placement."""
    changes = {
        r"parallelism: \d+ # nodes(\s+)completions: \d+": rf"parallelism: {launch.nodes} # nodes\1completions: {launch.nodes}",
        r'NUM_NODES, value: "\d+"': f'NUM_NODES, value: "{launch.nodes}"',
        r'NUM_GPUS, value: "\d+"': f'NUM_GPUS, value: "{launch.per_node}"',
        r"nvidia\.com/gpu: \d+": f"nvidia.com/gpu: {launch.per_node}",
        r"value: /checkpoints/mine": f"value: /checkpoints/{launch.job}",
        r"--precision bf16": f"--precision {launch.precision}",
    }
    if launch.on_last != launch.per_node:
        changes[r'--nproc-per-node "\$NUM_GPUS"'] = f"--nproc-per-node {_processes(launch, 'NODE_RANK', '$NUM_GPUS')}"
    if launch.has_own_loop:
        trainer = f'python "$LOOP" --endpoint "$ENDPOINT" --job {launch.job}'
        changes |= {
            r'headrace train --endpoint "\$ENDPOINT" --job mine.*?--resume "\$CHECKPOINTS"': trainer,
            r"( *)- \{name: NUM_NODES": r"\1- {name: LOOP, value: YOUR_LOOP.py} # in an image of yours\n\1- {name: NUM_NODES",
        }
        return _changed(deployment_file(f"{_JOBSET_FOLDER}/jobset.yaml"), changes)
    topology = f" --topology {_MOUNTED}/{launch.topology}" if launch.topology else ""
    changes[r"--job mine"] = f"--job {launch.job}{topology}"
    if launch.topology:
        changes |= {
            r"( *)- \{name: checkpoints, mountPath": rf"\1- {{name: job, mountPath: {_MOUNTED}, readOnly: true}}\n\g<0>",
            r"( *)- name: checkpoints #": r"\1- name: job\n\1  configMap: {name: headrace-job}\n\g<0>",
        }
    return _changed(deployment_file(f"{_JOBSET_FOLDER}/jobset.yaml"), changes)


def kustomization(launch: Launch) -> str:
    """Return the kustomization of the JobSet, whose config map has the job's spec and the topology."""
    files = ", ".join([f"job.yaml={launch.spec}", *([launch.topology] if launch.topology else [])])
    return _changed(deployment_file(f"{_JOBSET_FOLDER}/kustomization.yaml"), {r"files: \[job\.yaml\]": f"files: [{files}]"})


def _trainer(launch: Launch, endpoint: str, job: str, folder: str, loop: str) -> str:
    """Return the shell's words for the trainers' command, in which endpoint, folder and loop may be variables."""
    if launch.has_own_loop:
        return f'python "{loop}" --endpoint "{endpoint}" --job "{job}"'
    topology = f' --topology "{folder}/{launch.topology}"' if launch.topology else ""
    return f'headrace train --endpoint "{endpoint}" --job "{job}" --precision {launch.precision}{topology}'


def _processes(launch: Launch, node: str, usual: str = "") -> str:
    """Return the shell's word for the number of processes of a node, whose number a variable has."""
    usual = usual or str(launch.per_node)
    if launch.on_last == launch.per_node:
        return usual
    return f'"$([ "${node}" = {launch.nodes - 1} ] && echo {launch.on_last} || echo "{usual}")"'


def _changed(text: str, changes: Mapping[str, str]) -> str:
    """Replace what matches each pattern, which is in the text once."""
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
        assert count == 1, f"{pattern} is in the template {count} times"
    return text
