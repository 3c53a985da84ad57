"""Tensors of a device go through gloo by way of host memory. The device is EMULATED: none of this has run on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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
from headrace.trainer.recovery.layer_transfer import Transfer, move
from headrace.trainer.recovery.recoverable_step import _sum_gradients
from tests.emulated_device import DEVICE, DeviceTensor, emulated_device

CPU = torch.device("cpu")
SHAPE = (3, 2)


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


def mesh_of(rank: int, group: dist.ProcessGroup) -> Any:
    """What a transfer and a sum need of a Mesh."""
    wait = methodcaller("wait")
    return SimpleNamespace(rank=rank, everybody=group, wait=wait, wait_for_message=wait, interruptible=nullcontext)


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


def test_state_of_layers_on_the_device_reaches_the_host_of_another_node() -> None:
    def run(rank: int, group: dist.ProcessGroup) -> dict[str, list[Tensor]]:
        lengths, transfers = {"weight": (4, 1)}, [Transfer(name="weight", source=0, target=1)]
        state = [torch.arange(4.0, device=DEVICE), torch.full((1,), 7.0, device=DEVICE)]
        return move(mesh_of(rank, group), lengths, transfers, lambda _: state)

    sent, received = on_both(run)
    assert not sent
    assert [part.tolist() for part in received["weight"]] == [[0.0, 1.0, 2.0, 3.0], [7.0]]
    assert {part.device for part in received["weight"]} == {CPU}
