"""What a message keeps, and what becomes of it at the other end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from headrace.trainer.pipeline.send_receive import Wire

SHAPE = (3, 2)
CPU = torch.device("cpu")


@pytest.fixture
def groups() -> Iterator[list[ProcessGroupGloo]]:
    """Of two ranks, both in this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        yield list(pool.map(lambda rank: ProcessGroupGloo(store, rank, 2), range(2)))


@pytest.fixture
def wires(groups: list[ProcessGroupGloo]) -> list[Wire]:
    return [Wire(CPU, torch.float32, group) for group in groups]


def test_a_tensor_is_kept_until_its_answer_comes(wires: list[Wire]) -> None:
    rows = torch.ones(SHAPE, requires_grad=True) * 7
    sent = weakref.ref(rows)
    wires[0].send(rows, 1, tag=4)
    del rows
    wires[1].expect(SHAPE, 0, tag=4)
    assert wires[1].receive(0, tag=4).tolist() == torch.full(SHAPE, 7.0).tolist()
    assert sent() is not None

    wires[0].expect(SHAPE, 1, tag=7)  # of another message
    wires[1].send(torch.zeros(SHAPE), 0, tag=7)
    wires[0].receive(1, tag=7)
    assert sent() is not None

    wires[0].expect(SHAPE, 1, tag=5)
    wires[1].send(torch.zeros(SHAPE), 0, tag=5)
    wires[0].receive(1, tag=5)
    assert sent() is None


def test_a_tensor_without_an_answer_is_kept_until_all_have_left(wires: list[Wire]) -> None:
    rows = torch.ones(SHAPE)
    sent = weakref.ref(rows)
    wires[0].send(rows, 1, tag=4)
    del rows
    wires[1].expect(SHAPE, 0, tag=4)
    wires[1].receive(0, tag=4)
    assert sent() is not None
    wires[0].flush()
    assert sent() is None


@pytest.mark.parametrize("receiver", [0, 1], ids=["to itself", "to another"])
def test_what_arrives_is_cut_off_from_what_it_was_made_of(wires: list[Wire], receiver: int) -> None:
    source = torch.ones(SHAPE, requires_grad=True)
    wires[receiver].expect(SHAPE, 0, tag=0, requires_grad=True)
    wires[0].send(source * 2, receiver, tag=0)
    arrived = wires[receiver].receive(0, tag=0)
    (arrived * 3).sum().backward()
    assert arrived.grad is not None
    assert arrived.grad.tolist() == torch.full(SHAPE, 3.0).tolist()
    assert source.grad is None


@pytest.mark.parametrize("receiver", [0, 1], ids=["to itself", "to another"])
def test_rows_go_in_the_dtype_of_the_wire_one_behind_the_other(groups: list[ProcessGroupGloo], receiver: int) -> None:
    wires = [Wire(CPU, torch.bfloat16, group) for group in groups]
    rows = torch.arange(6.0, requires_grad=True).reshape(2, 3).T
    wires[receiver].expect(SHAPE, 0, tag=0, requires_grad=True)
    wires[0].send(rows, receiver, tag=0)
    arrived = wires[receiver].receive(0, tag=0)
    assert arrived.dtype == torch.bfloat16
    assert arrived.requires_grad
    assert arrived.tolist() == rows.tolist()
