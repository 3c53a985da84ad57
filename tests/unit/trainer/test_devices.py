"""What a GPU cannot train yet is refused in a sentence, before anything is sent or asked for; what none has, is warned of."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.errors import EndpointError, UserError
from headrace.model_shape import MODEL_SHAPES, ModelShape
from headrace.spec import parse
from headrace.trainer import models
from headrace.trainer.devices import (
    check_backend,
    check_device,
    check_gpus,
    check_operations,
    check_shared_gpus,
    local_device,
    told_if_lacking,
    warn_quadratic_attention,
    warn_unproven,
)
from headrace.trainer.pipeline.pipeline_training import train_pipeline
from headrace.trainer.pipeline.process_groups import PlaceGroups, ProcessGroups
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.trainer.recovery.node import train_recoverable
from headrace.trainer.recovery.nodes_spec import RecoverySpec
from headrace.trainer.starting import process_group
from headrace.trainer.train import train

GPU = torch.device("cuda", 0)
ANY: Any = None
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


def test_nodes_on_gpus_are_told_that_messages_are_staged_before_anybody_is_connected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RecoverySpec.model_validate({"nodes": 4, "units": UNITS})
    with pytest.raises(EndpointError):
        train_recoverable(NOBODY, job="job", spec=spec, node="a", device=torch.device("cpu"))
    assert "host memory" not in caplog.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises((EndpointError, RuntimeError)):  # torch has no GPU here
        train_recoverable(NOBODY, job="job", spec=spec, node="a", device=GPU)
    assert "through host memory, which is slower than NCCL and has run on one GPU only, shared by all nodes" in caplog.text


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


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cuda"), (2, "cuda:2")])
def test_a_gpu_that_a_script_asks_for_and_that_is_not_there_is_refused_before_anybody_is_connected(
    num_gpus: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    gpu, spec = torch.device(device), RecoverySpec.model_validate({"nodes": 4, "units": UNITS})
    refused = pytest.raises(UserError, match=rf"^the device {device}, but torch finds {num_gpus} GPU\(s\) here")
    with refused:
        train(NOBODY, job="job", device=gpu)
    with refused:
        train_pipeline(NOBODY, job="job", topology=parse(PipelineTopology, {"units": {"llm": {}}}, "topology"), device=gpu)
    with refused:
        train_recoverable(NOBODY, job="job", spec=spec, node="a", device=gpu)
    with refused:
        models.load("nowhere", spec=ANY, vocabulary=ANY, device=device)
    check_device(torch.device("cpu"))


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


def test_ranks_learn_of_each_others_gpus_before_they_join(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        uuid = "b"

    class Watch:
        channel: Any

    store, watch = dist.HashStore(), Watch()
    store.set("gpu 1", "b")  # as rank 1 would
    watch.channel = type("Channel", (), {"store": lambda _: store})()
    for name, value in {"is_available": True, "device_count": 1, "set_device": None, "get_device_properties": Gpu()}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for name, number in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, number)
    joining: Any = watch
    with pytest.raises(UserError, match=r"^ranks 0 and 1 have the same GPU \(b\)"), process_group(GPU, joining):
        pass
    assert not dist.is_initialized()


def test_a_pipeline_of_one_process_has_its_groups_too() -> None:
    topology = parse(PipelineTopology, {"units": {"llm": {}}}, "topology")
    with process_group(torch.device("cpu"), None, alone=True):
        groups = ProcessGroups.make(topology, torch.device("cpu"), tied=True)
        assert (groups.everybody.size(), *groups.of_place.values()) == (1, PlaceGroups(None, None, None, None))
    assert not dist.is_initialized()
    with process_group(torch.device("cpu"), None):
        assert not dist.is_initialized()


def test_a_torch_without_nccl_is_refused_for_several_gpus() -> None:
    check_backend("cpu", has_nccl=False)
    check_backend("cuda", has_nccl=True)
    with pytest.raises(UserError, match="this build of torch lacks"):
        check_backend("cuda", has_nccl=False)


class Lacking(dist.ProcessGroup):
    """A backend with nothing but an all-reduce."""

    def allreduce(self, *_: object) -> dist.Work:
        return Done()


class Done(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


def test_a_backend_that_lacks_an_operation_is_refused_by_the_name_of_both() -> None:
    dist.Backend.register_backend("lacking", lambda store, rank, size, timeout: Lacking(rank, size), devices=["cpu"])
    dist.init_process_group("lacking", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        with pytest.raises(UserError, match=r"needs reduce-scatter of 1 .*, which the backend lacking lacks .*: take the rel"):
            check_operations(group, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_an_operation_that_fails_for_another_reason_is_not_taken_for_one_that_lacks() -> None:
    with pytest.raises(RuntimeError, match="connection reset"), told_if_lacking("messages", "gloo", torch.device("cpu")):
        raise RuntimeError("connection reset by peer")
    refused = pytest.raises(
        UserError, match=r"needs messages on cpu, which the backend mine lacks \(Backend mine does not support"
    )
    with refused, told_if_lacking("messages", "mine", torch.device("cpu")):
        raise RuntimeError("Backend mine does not support send")


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
