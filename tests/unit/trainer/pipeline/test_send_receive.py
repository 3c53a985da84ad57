"""What a message keeps, and what becomes of it at the other end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from headrace.schedule import Kind
from headrace.spec import parse
from headrace.trainer.pipeline.channels import Channel, ChannelEnd, Channels
from headrace.trainer.pipeline.send_receive import Wire
from headrace.trainer.pipeline.topology import PipelineTopology
from tests.ordered_backend import OrderedBackend

SHAPE = (3, 2)
CPU = torch.device("cpu")
TOPOLOGY = parse(PipelineTopology, {"units": {"llm": {"pp": 2}}}, "topology")


@pytest.fixture
def backends() -> Iterator[list[ProcessGroupGloo]]:
    """Of two ranks, both in this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        yield list(pool.map(lambda rank: ProcessGroupGloo(store, rank, 2), range(2)))


def wires_of(backends: Sequence[object], dtype: torch.dtype = torch.float32) -> list[Wire]:
    """Over channels that gloo keeps apart by tags."""

    def make(rank: int) -> Wire:
        backend = cast(dist.ProcessGroup, backends[rank])
        channels = Channels(TOPOLOGY, rank, CPU, lambda ranks: ChannelEnd(backend, 1 - rank, ranks.tag))
        return Wire(channels, CPU, dtype)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(make, range(2)))


def forward(sender: int, receiver: int) -> Channel:
    return Channel(Kind.FORWARD, sender, receiver)


def backward(sender: int, receiver: int) -> Channel:
    return Channel(Kind.BACKWARD, sender, receiver)


@pytest.fixture
def wires(backends: list[ProcessGroupGloo]) -> list[Wire]:
    return wires_of(backends)


def test_a_tensor_is_kept_until_its_answer_comes(wires: list[Wire]) -> None:
    rows = torch.ones(SHAPE, requires_grad=True) * 7
    sent = weakref.ref(rows)
    wires[0].send(rows, forward(0, 1), 4)
    del rows
    wires[1].expect(SHAPE, forward(0, 1), 4)
    assert wires[1].receive(forward(0, 1), 4).tolist() == torch.full(SHAPE, 7.0).tolist()
    assert sent() is not None

    wires[0].expect(SHAPE, backward(1, 0), 7)  # of another message
    wires[1].send(torch.zeros(SHAPE), backward(1, 0), 7)
    wires[0].receive(backward(1, 0), 7)
    assert sent() is not None

    wires[0].expect(SHAPE, backward(1, 0), 4)
    wires[1].send(torch.zeros(SHAPE), backward(1, 0), 4)
    wires[0].receive(backward(1, 0), 4)
    assert sent() is None


def test_a_tensor_without_an_answer_is_kept_until_all_have_left(wires: list[Wire]) -> None:
    rows = torch.ones(SHAPE)
    sent = weakref.ref(rows)
    wires[0].send(rows, forward(0, 1), 4)
    del rows
    wires[1].expect(SHAPE, forward(0, 1), 4)
    wires[1].receive(forward(0, 1), 4)
    assert sent() is not None
    wires[0].flush()
    assert sent() is None


def test_a_tensor_without_an_answer_is_dropped_once_it_has_left_where_the_backend_says_so(
    backends: list[ProcessGroupGloo],
) -> None:
    """As NCCL does, in an emulation of which a message begins once the one in front has left."""
    wires = wires_of([OrderedBackend(cast(dist.ProcessGroup, backend)) for backend in backends])
    sent = []
    for number in range(3):
        rows = torch.ones(SHAPE)
        sent.append(weakref.ref(rows))
        wires[1].send(rows, backward(1, 0), number)
        del rows
        if number < 2:
            wires[0].expect(SHAPE, backward(1, 0), number)
            wires[0].receive(backward(1, 0), number)
    assert sent[0]() is None
    assert sent[2]() is not None, "nobody has taken it"


def test_a_message_is_kept_until_it_is_needed(wires: list[Wire]) -> None:
    """They are expected in the order in which they are sent, and taken in another one."""
    numbers = [5, 2, 9]
    for number in numbers:
        wires[0].send(torch.full((number, 2), float(number)), forward(0, 1), number)
    for number in numbers:
        wires[1].expect((number, 2), forward(0, 1), number)
    for number in sorted(numbers):
        assert wires[1].receive(forward(0, 1), number).tolist() == torch.full((number, 2), float(number)).tolist()


@pytest.mark.parametrize("receiver", [0, 1], ids=["to itself", "to another"])
def test_what_arrives_is_cut_off_from_what_it_was_made_of(wires: list[Wire], receiver: int) -> None:
    source = torch.ones(SHAPE, requires_grad=True)
    wires[receiver].expect(SHAPE, forward(0, receiver), 0, requires_grad=True)
    wires[0].send(source * 2, forward(0, receiver), 0)
    arrived = wires[receiver].receive(forward(0, receiver), 0)
    (arrived * 3).sum().backward()
    assert arrived.grad is not None
    assert arrived.grad.tolist() == torch.full(SHAPE, 3.0).tolist()
    assert source.grad is None


@pytest.mark.parametrize("receiver", [0, 1], ids=["to itself", "to another"])
def test_rows_go_in_the_dtype_of_the_wire_one_behind_the_other(backends: list[ProcessGroupGloo], receiver: int) -> None:
    wires = wires_of(backends, torch.bfloat16)
    rows = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    wires[receiver].expect(SHAPE, forward(0, receiver), 0, requires_grad=True)
    wires[0].send(rows, forward(0, receiver), 0)
    arrived = wires[receiver].receive(forward(0, receiver), 0)
    assert arrived.dtype == torch.bfloat16
    assert arrived.requires_grad
    assert arrived.tolist() == rows.tolist()


def test_the_emulation_of_nccl_ignores_tags(backends: list[ProcessGroupGloo]) -> None:
    one, other = (OrderedBackend(cast(dist.ProcessGroup, backend)) for backend in backends)
    sends = [one.send([torch.full(SHAPE, float(tag))], 1, tag) for tag in (3, 8)]
    got = [torch.zeros(SHAPE) for _ in sends]
    for tag, tensor in zip((8, 3), got, strict=True):
        other.recv([tensor], 0, tag).wait()
    for send in sends:
        send.wait()
    assert [tensor[0, 0].item() for tensor in got] == [3, 8]


def test_the_emulation_of_nccl_holds_up_a_send_behind_a_receive(backends: list[ProcessGroupGloo]) -> None:
    """Both ends receive before they send, and stop there until a message from elsewhere comes."""
    one, other = (OrderedBackend(cast(dist.ProcessGroup, backend)) for backend in backends)
    arrived, arrived_there, last = (torch.zeros(SHAPE) for _ in range(3))
    received, received_there = one.recv([arrived], 1, 0), other.recv([arrived_there], 0, 0)
    sent, sent_there = one.send([torch.full(SHAPE, 1.0)], 1, 0), other.send([torch.full(SHAPE, 2.0)], 0, 0)
    from_elsewhere = backends[0].send([torch.full(SHAPE, 9.0)], 1, 0)
    for work in (from_elsewhere, received_there, sent_there, received):
        work.wait()
    other.recv([last], 0, 0).wait()
    sent.wait()
    assert [tensor[0, 0].item() for tensor in (arrived_there, arrived, last)] == [9, 2, 1]
