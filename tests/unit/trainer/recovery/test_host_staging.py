"""Tensors of a device go through gloo by way of host memory. The device is EMULATED: none of this has run on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ProcessGroupGloo

from headrace.schedule import Kind
from headrace.trainer.pipeline.channels import Channel, ChannelEnd
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.recovery.host_staging import from_host, staged, to_host, waiting
from headrace.trainer.recovery.layer_transfer import CHUNK_BYTES, Transfer, move
from headrace.trainer.recovery.recoverable_step import _sum_gradients
from headrace.trainer.recovery.state_streams import Door, Streams, open_streams
from tests.emulated_device import DEVICE, DeviceTensor, emulated_device

CPU = torch.device("cpu")
SHAPE = (3, 2)
LONG = CHUNK_BYTES // 4 + 5  # elements of more than one chunk


def on_both(run: Callable[[int, dist.ProcessGroup], Any]) -> list[Any]:
    """What `run(rank, group)` returns on each of two ranks of a gloo group, which are threads here."""
    store = dist.HashStore()  # type: ignore[attr-defined]

    def of(rank: int) -> Any:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        with emulated_device():
            return run(rank, ProcessGroupGloo(store, rank, 2, options))  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        return [future.result(60.0) for future in [pool.submit(of, rank) for rank in range(2)]]


def mesh_of(rank: int, group: dist.ProcessGroup, doors: Sequence[Door] = ()) -> Any:
    """What a transfer and a sum need of a Mesh. doors: of all ranks."""

    def streams(targets: Collection[int], sources: Collection[int]) -> AbstractContextManager[Streams]:
        told = [door.told for door in doors]
        return open_streams(doors[rank], told, rank, targets=targets, sources=sources, timeout_s=60.0, check=lambda: None)

    return SimpleNamespace(rank=rank, everybody=group, wait=methodcaller("wait"), interruptible=nullcontext, streams=streams)


def test_gloo_gets_at_no_memory_of_the_emulated_device() -> None:
    """So that the tests below fail where anything is handed over as it is."""

    def run(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(RuntimeError):
            group.allreduce([torch.ones(SHAPE, device=DEVICE)])

    on_both(run)


def test_on_a_cpu_nothing_is_copied() -> None:
    tensor = torch.ones(SHAPE)
    assert to_host(tensor) is tensor
    assert from_host(tensor, tensor) is tensor

    def run(rank: int, group: dist.ProcessGroup) -> None:
        assert staged(group, CPU) is group

    on_both(run)


def test_values_go_to_the_host_and_back() -> None:
    with emulated_device():
        tensor = torch.full(SHAPE, 3.0, device=DEVICE, requires_grad=True)
        host = to_host(tensor)
        assert (host.device, type(host), host.requires_grad) == (CPU, Tensor, False)
        assert host.tolist() == [[3.0, 3.0]] * 3
        assert from_host(2 * host, tensor) is tensor
        assert isinstance(tensor, DeviceTensor)
        assert tensor.values.tolist() == [[6.0, 6.0]] * 3
        assert tensor.requires_grad


FORWARD, BACKWARD = Channel(Kind.FORWARD, 0, 1), Channel(Kind.BACKWARD, 1, 0)


class Ends(dict[Channel, ChannelEnd]):
    """Takes the place of the channels of a topology."""

    def are_within(self, _: Channel) -> bool:
        return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_and_gradients_arrive_on_the_device(dtype: torch.dtype) -> None:
    def run(rank: int, group: dist.ProcessGroup) -> Tensor:
        of_device = staged(group, DEVICE)
        channels: Any = Ends({FORWARD: ChannelEnd(of_device, 1 - rank, 0), BACKWARD: ChannelEnd(of_device, 1 - rank, 1)})
        wire = Wire(channels, DEVICE, dtype, waiting(methodcaller("wait")))
        weights = torch.full(SHAPE, 1.5, device=DEVICE, requires_grad=True)
        if rank == 0:
            activations = 2 * weights
            wire.expect(SHAPE, BACKWARD, 0)
            wire.send(activations, FORWARD, 0)
            activations.backward(wire.receive(BACKWARD, 0).to(activations.dtype))
        else:
            wire.expect(SHAPE, FORWARD, 0, requires_grad=True)
            hidden = wire.receive(FORWARD, 0)
            assert isinstance(hidden, DeviceTensor)
            assert hidden.values.tolist() == [[3.0, 3.0]] * 3
            (hidden * hidden).sum().backward()
            assert hidden.grad is not None
            wire.send(hidden.grad, BACKWARD, 0)
        wire.flush()
        assert rank == 1 or isinstance(weights.grad, DeviceTensor)
        return weights.grad.values if rank == 0 else torch.empty(0)  # type: ignore[union-attr]

    assert on_both(run)[0].tolist() == [[12.0, 12.0]] * 3


def test_gradients_are_summed_over_pipelines_and_stay_on_the_device() -> None:
    def run(rank: int, group: dist.ProcessGroup) -> list[Any]:
        both, one, none = (nn.Parameter(torch.zeros(4, device=DEVICE)) for _ in range(3))
        both.grad = torch.full((4,), 1.0 + rank, device=DEVICE)
        if rank == 1:
            one.grad = torch.full((4,), 5.0, device=DEVICE)
        _sum_gradients(mesh_of(rank, group), group, [both, one, none])
        assert isinstance(both.grad, DeviceTensor)
        assert isinstance(one.grad, DeviceTensor)
        return [both.grad.values.tolist(), one.grad.values.tolist(), none.grad]

    assert on_both(run) == [[[3.0] * 4, [5.0] * 4, None]] * 2


def test_state_of_layers_on_the_device_reaches_the_device_of_another_node() -> None:
    doors = [Door("127.0.0.1") for _ in range(2)]
    lengths, transfers = {"weight": (LONG, 1)}, [Transfer(name="weight", source=0, target=1)]

    def run(rank: int, group: dist.ProcessGroup) -> dict[str, list[Tensor]]:
        state = [torch.arange(LONG, device=DEVICE, dtype=torch.float32), torch.full((1,), 7.0, device=DEVICE)]
        return move(mesh_of(rank, group, doors), lengths, transfers, lambda _: state, device=DEVICE)

    sent, received = on_both(run)
    assert not sent
    weight, steps = received["weight"]
    assert isinstance(weight, DeviceTensor)
    assert isinstance(steps, DeviceTensor)
    assert torch.equal(weight.values, torch.arange(LONG, dtype=torch.float32))
    assert steps.values.tolist() == [7.0]
    for door in doors:
        door.close()
