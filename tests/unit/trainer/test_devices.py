"""What a GPU cannot train yet is refused in a sentence, before anything is sent or asked for; what none has, is warned of."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import EndpointError, UserError
from headrace.model_shape import MODEL_SHAPES, ModelShape
from headrace.trainer.devices import (
    check_backend,
    check_gpus,
    check_shared_gpus,
    local_device,
    warn_quadratic_attention,
    warn_unproven,
)
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


def test_nodes_on_gpus_are_told_that_messages_are_staged_before_anybody_is_connected(caplog: pytest.LogCaptureFixture) -> None:
    spec = RecoverySpec.model_validate({"nodes": 4, "units": UNITS})
    with pytest.raises(EndpointError):
        train_recoverable(NOBODY, job="job", spec=spec, node="a", device=torch.device("cpu"))
    assert "host memory" not in caplog.text
    with pytest.raises((EndpointError, RuntimeError)):  # torch has no GPU here
        train_recoverable(NOBODY, job="job", spec=spec, node="a", device=GPU)
    assert "through host memory, which is slower than NCCL and has run with an emulated device only" in caplog.text


def test_the_cpu_is_taken_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert local_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device() == local_device("cuda") == torch.device("cuda", 3)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device() == torch.device("cpu")
    with pytest.raises(UserError, match="--device cuda, but torch finds no GPU"):
        local_device("cuda")


@pytest.mark.parametrize(("local_rank", "local_ranks", "num_gpus"), [(0, 1, 1), (3, 4, 4), (0, 2, 8)])
def test_as_many_ranks_as_a_host_has_gpus_are_let_through(local_rank: int, local_ranks: int, num_gpus: int) -> None:
    check_gpus(local_rank, local_ranks, num_gpus)


@pytest.mark.parametrize(("local_rank", "local_ranks", "num_gpus", "ranks"), [(0, 2, 1, 2), (7, 8, 4, 8), (1, 1, 1, 2)])
def test_more_ranks_than_gpus_are_refused_on_all_of_them(local_rank: int, local_ranks: int, num_gpus: int, ranks: int) -> None:
    with pytest.raises(UserError, match=rf"^{ranks} ranks on this host, .* sees {num_gpus} GPU\(s\), .* --nproc-per-node"):
        check_gpus(local_rank, local_ranks, num_gpus)


def test_two_ranks_on_one_gpu_are_refused_by_name() -> None:
    check_shared_gpus({0: "a", 1: "b", 2: "c"})
    with pytest.raises(UserError, match=r"ranks 1 and 2 have the same GPU \(b\), .* CUDA_VISIBLE_DEVICES"):
        check_shared_gpus({0: "a", 1: "b", 2: "b"})


def test_a_torch_without_nccl_is_refused_for_several_gpus() -> None:
    check_backend("cpu", has_nccl=False)
    check_backend("cuda", has_nccl=True)
    with pytest.raises(UserError, match="this build of torch lacks"):
        check_backend("cuda", has_nccl=False)


SHAPES = MODEL_SHAPES.values()
GROUPED = next(shape for shape in SHAPES if shape.llm.heads != shape.llm.kv_heads)


@pytest.mark.parametrize(
    ("device_type", "precision", "shape", "warns"),
    [("cuda", "fp32", GROUPED, True), ("cuda", "bf16", GROUPED, False), ("cpu", "fp32", GROUPED, False)],
)
def test_grouped_queries_in_float32_on_a_gpu_are_warned_of(
    caplog: pytest.LogCaptureFixture, device_type: str, precision: str, shape: ModelShape, warns: bool
) -> None:
    warn_quadratic_attention(device_type, precision, shape)
    assert ("--precision bf16 unit=llm" in caplog.text) == warns
