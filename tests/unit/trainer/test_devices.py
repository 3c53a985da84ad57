"""What a GPU cannot train yet is refused in a sentence, before anything is sent or asked for; what none has, is warned of."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import UserError
from headrace.trainer.devices import check_nodes, local_device, warn_unproven
from headrace.trainer.recovery.node import train_recoverable
from headrace.trainer.recovery.nodes_spec import RecoverySpec

GPU = torch.device("cuda", 0)
NOBODY = "127.0.0.1:1"
UNITS = {"encoder": {}, "llm": {}}


@pytest.mark.parametrize(("device_type", "world_size"), [("cpu", 1), ("cpu", 64), ("cuda", 1)])
def test_what_has_been_run_needs_no_warning(device_type: str, world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    warn_unproven(device_type, world_size)
    assert not caplog.records


@pytest.mark.parametrize("world_size", [2, 64])
def test_a_pipeline_of_several_gpus_is_warned_of(world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    warn_unproven("cuda", world_size)
    assert f"--device cpu goes on processes={world_size} device=cuda" in caplog.text


def test_nodes_with_gpus_are_refused() -> None:
    check_nodes("cpu")
    with pytest.raises(UserError, match=r"host memory, .* --device cpu"):
        check_nodes("cuda")


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
