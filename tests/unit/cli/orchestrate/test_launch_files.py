"""What starts a placement's trainers: scripts that their shells read, and documents that Kubernetes takes, with its numbers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli import deployment_files
from headrace.cli.deployment_files import deployment_file
from headrace.cli.main import _parse
from headrace.cli.orchestrate.launch_files import SLURM, TORCHRUN, Launch, LaunchCommands, write_launch_files
from headrace.errors import UserError
from tests.kubernetes_documents import containers, faults, pod_specs, unrestricted
from tests.kustomization import Document, kustomized

SPEC = "name: placed\nsources: [{path: /data}]\nglobal_batch: 8\n"
TOPOLOGY = "units: {vision: {}, llm: {dp: 9}}\n"


def launch(**changed: Any) -> Launch:
    usual = {"title": "1b on 16 x a40", "job": "placed", "spec": "job-execution.yaml", "precision": "bf16"}
    return Launch(**{**usual, "processes": 16, "per_node": 4, **changed})


EVEN, UNEVEN = launch(), launch(processes=10, topology="topology.yaml")
LOOP, ONE_NODE = launch(has_own_loop=True), launch(processes=2, per_node=2, precision="fp32")
each = pytest.mark.parametrize("started", [EVEN, UNEVEN, LOOP, ONE_NODE], ids=["even", "uneven", "loop", "one node"])


def written(started: Launch, out: Path) -> LaunchCommands:
    (out / started.spec).write_text(SPEC)
    (out / "topology.yaml").write_text(TOPOLOGY)
    paths, commands = write_launch_files(out, started)
    assert all(path.is_file() for path in paths)
    return commands


def programs(folder: Path) -> Path:
    """A folder of programs which say how they are called."""
    folder.mkdir()
    for name in ("torchrun", "headrace"):
        (folder / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def called(words: list[str], folder: Path, **env: str) -> list[list[str]]:
    """The calls of torchrun and headrace, each with its words."""
    environment = {"PATH": f"{folder}:/usr/bin:/bin", **env}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    calls: list[list[str]] = []
    for word in done.stdout.splitlines():
        if word in ("torchrun", "headrace") and (not calls or "--no-python" not in calls[-1]):
            calls.append([])
        calls[-1].append(word)
    return calls


def processes_of(words: list[str], started: Launch, node: int) -> None:
    """Check the command of one node with the parsers of torchrun and headrace."""
    from torch.distributed.run import get_args_parser

    found = get_args_parser().parse_args(words[1:])
    last = node == started.nodes - 1
    assert (found.nnodes, found.node_rank, found.no_python) == (str(started.nodes), node, True)
    assert found.nproc_per_node == str(started.on_last if last else started.per_node)
    if started.has_own_loop:
        assert found.training_script == "python"
        assert found.training_script_args[1:] == ["--endpoint", "service:7070", "--job", "placed"]
        return
    assert found.training_script == "headrace"
    arguments = _parse(found.training_script_args)
    assert (arguments.command, arguments.job, arguments.precision) == ("train", "placed", started.precision)
    assert (arguments.topology is not None) == bool(started.topology)


@each
def test_torchrun_starts_all_processes_of_a_node_once_the_job_is_there(started: Launch, tmp_path: Path) -> None:
    written(started, tmp_path)
    folder = programs(tmp_path / "programs")
    total = 0
    for node in range(started.nodes):
        variables = {"NODE_RANK": str(node), "MASTER_ADDR": "first", "ENDPOINT": "service:7070", "LOOP": "loop.py"}
        *submitted, ranks = called(["bash", str(tmp_path / TORCHRUN)], folder, **variables)
        assert len(submitted) == (node == 0)
        for call in submitted:
            _parse(call[1:])
            assert call[1:4] == ["job", "submit", str(tmp_path / started.spec)]
        processes_of(ranks, started, node)
        assert ranks[ranks.index("--master-addr") + 1] == "first"
        total += int(ranks[ranks.index("--nproc-per-node") + 1])
        if started.topology:
            assert ranks[-1] == str(tmp_path / "topology.yaml")
    assert total == started.processes


def test_torchrun_on_several_nodes_asks_which_one_this_is(tmp_path: Path) -> None:
    written(EVEN, tmp_path)
    done = subprocess.run(
        ["bash", str(tmp_path / TORCHRUN)],
        env={"ENDPOINT": "service:7070", "MASTER_ADDR": "first", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "NODE_RANK: does not say which node this is" in done.stderr


@each
def test_the_slurm_script_has_the_nodes_and_the_command_of_the_placement(started: Launch, tmp_path: Path) -> None:
    commands = written(started, tmp_path)
    subprocess.run(["bash", "-n", str(tmp_path / SLURM)], check=True, timeout=60)
    text, template = (tmp_path / SLURM).read_text(), deployment_file("slurm/headrace.sbatch")
    ours, theirs = ([line for line in one.splitlines() if line.startswith("#SBATCH")] for one in (text, template))
    assert ours[:-1] == theirs[:-1], "the services stay as they are"
    assert f"--nodes={started.nodes} " in ours[-1]
    assert ours[-1].endswith(f" --gpus-per-node={started.per_node}")
    assert commands.slurm.endswith(f"{tmp_path / SLURM} {tmp_path / started.spec}")
    folder = programs(tmp_path / "programs")
    start = text.index("train=(")
    head = text[start : text.index("\n", start)]
    step = re.search(r"bash -c '(.*?)'", text, re.DOTALL)
    assert step is not None
    prepared = f"set -euo pipefail\nendpoint=service:7070 job=placed spec={tmp_path / started.spec}\n{head}\n"
    script = f"{prepared}exec bash -c '{step[1]}' first 1234 \"${{train[@]}}\""
    for node in range(started.nodes):
        variables = {"SLURM_NODEID": str(node), "SLURM_STEP_NUM_NODES": str(started.nodes), "HEADRACE_LOOP": "loop.py"}
        [ranks] = called(["bash", "-c", script], folder, **variables)
        processes_of(ranks, started, node)


def worker(documents: list[Document]) -> tuple[dict[str, Any], dict[str, Any]]:
    (jobset,) = [document for document in documents if document["kind"] == "JobSet"]
    workers = jobset["spec"]["replicatedJobs"][1]["template"]["spec"]
    (container,) = workers["template"]["spec"]["containers"]
    return workers, container


@each
def test_kubernetes_takes_the_jobset_with_the_processes_of_the_placement(started: Launch, tmp_path: Path) -> None:
    written(started, tmp_path)
    documents = kustomized(tmp_path)
    assert [fault for document in documents for fault in faults(document)] == []
    for pod in (pod for document in documents for pod in pod_specs(document)):
        assert unrestricted(pod) == []
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]} == volumes
    (config,) = [document for document in documents if document["kind"] == "ConfigMap"]
    assert yaml.safe_load(config["data"]["job.yaml"])["name"] == "placed"
    assert ("topology.yaml" in config["data"]) == bool(started.topology)
    workers, container = worker(documents)
    assert workers["parallelism"] == workers["completions"] == started.nodes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == started.per_node
    folder = programs(tmp_path / "programs")
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    given |= {"CHECKPOINTS": str(tmp_path / "checkpoints"), "ENDPOINT": "service:7070"}
    for node in range(started.nodes):
        variables = {**given, "NODE_RANK": str(node), "MASTER_ADDR": "first"}
        [ranks] = called([*container["command"], *container["args"]], folder, **variables)
        processes_of(ranks, started, node)
        assert ("--topology" in ranks) == bool(started.topology)


def test_files_of_deploy_that_are_not_installed_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment_files, "__file__", str(tmp_path / "cli" / "headrace" / "cli" / "deployment_files.py"))
    with pytest.raises(UserError, match=r"deploy/slurm/headrace\.sbatch is not part of this installation"):
        deployment_file("slurm/headrace.sbatch")
