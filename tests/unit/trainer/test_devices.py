"""What a GPU cannot train yet is refused in a sentence, before anything is sent or asked for."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import UserError
from headrace.trainer.devices import check_nodes, check_pipeline, local_device
from headrace.trainer.pipeline.pipeline_training import train_pipeline
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.trainer.recovery.node import train_recoverable
from headrace.trainer.recovery.nodes_spec import RecoverySpec

GPU = torch.device("cuda", 0)
NOBODY = "127.0.0.1:1"
UNITS = {"encoder": {}, "llm": {}}


@pytest.mark.parametrize(("device_type", "world_size"), [("cpu", 1), ("cpu", 64), ("cuda", 1)])
def test_what_runs_is_let_through(device_type: str, world_size: int) -> None:
    check_pipeline(device_type, world_size)


@pytest.mark.parametrize("world_size", [2, 64])
def test_a_pipeline_of_several_gpus_is_refused(world_size: int) -> None:
    with pytest.raises(UserError, match=rf"of {world_size} processes on cuda devices .* --device cpu"):
        check_pipeline("cuda", world_size)


def test_nodes_with_gpus_are_refused() -> None:
    check_nodes("cpu")
    with pytest.raises(UserError, match=r"host memory, .* --device cpu"):
        check_nodes("cuda")


def test_a_pipeline_is_refused_before_anybody_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    topology = PipelineTopology.model_validate({"units": UNITS})
    with pytest.raises(UserError, match="a pipeline of 2 processes"):
        train_pipeline(NOBODY, job="job", topology=topology, device=GPU)


def test_nodes_are_refused_before_anybody_is_connected() -> None:
    spec = RecoverySpec.model_validate({"nodes": 4, "units": UNITS})
    with pytest.raises(UserError, match="nodes that may be lost"):
        train_recoverable(NOBODY, job="job", spec=spec, node="a", device=GPU)


def test_the_cpu_is_taken_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert local_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device() == local_device("cuda") == torch.device("cuda", 3)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device() == torch.device("cpu")
    with pytest.raises(UserError, match="--device cuda, but torch finds no GPU"):
        local_device("cuda")
