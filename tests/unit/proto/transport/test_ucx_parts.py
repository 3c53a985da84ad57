"""Parts through UCX, from a real server to real receivers over loopback: how they come."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from headrace.errors import HeadraceError, NotFoundError, PermissionDeniedError, UnavailableError
from headrace.transport.ucx import UcxReceiver
from headrace.transport.ucx_buffers import ReceiveBuffers
from tests.unit.proto.transport.ucx_world import MIB, Lender, contents, payload


@pytest.mark.parametrize("num_bytes", [1, 700, 8 << 10, 100_000, 300_000, MIB, 5 * MIB + 7])
def test_a_part_comes_as_it_was_sent_by_every_protocol_of_ucx(lender: Lender, receiver: UcxReceiver, num_bytes: int) -> None:
    lender.parts["part"] = contents(num_bytes)
    delivery = receiver.fetch("part", 20)
    assert payload(delivery).equals(contents(num_bytes))
    assert (delivery.header.num_bytes, delivery.header.num_samples) == (num_bytes, 3)
    assert not payload(delivery).is_mutable
    assert lender.wait_for_end("part") is None


def test_the_lanes_are_told(receiver: UcxReceiver) -> None:
    assert receiver.lanes
    assert all(re.fullmatch(r"\w+/[\w.:-]+", lane) for lane in receiver.lanes)
    assert receiver.fetch("part", 20).transport == receiver.transport
    assert receiver.transport == "ucx:" + "+".join(sorted({lane.split("/")[0] for lane in receiver.lanes}))


def test_a_released_buffer_takes_the_next_part_and_a_held_one_does_not(
    lender: Lender, receiver: UcxReceiver, buffers: ReceiveBuffers
) -> None:
    lender.parts |= {str(k): contents(MIB, k) for k in range(3)}
    first = receiver.fetch("0", 20)
    second = receiver.fetch("1", 20)
    address = payload(first).address
    first.release()
    first.release()
    third = receiver.fetch("2", 20)
    assert payload(third).address == address
    assert payload(second).equals(contents(MIB, 1))
    assert payload(third).equals(contents(MIB, 2))
    receiver.close()
    assert payload(second).equals(contents(MIB, 1)), "deliveries outlive the connection"
    second.release()
    third.release()
    assert buffers.idle_bytes == 2 * MIB


def test_many_threads_get_each_its_own_part(lender: Lender, receiver: UcxReceiver, buffers: ReceiveBuffers) -> None:
    sizes = [(37 * k) ** 2 * 11 + 1 for k in range(40)]  # 1 byte to 23 MB
    lender.parts |= {str(k): contents(size, k) for k, size in enumerate(sizes)}

    def fetch(k: int) -> bool:
        delivery = receiver.fetch(str(k), 60)
        try:
            return bool(payload(delivery).equals(lender.parts[str(k)]))
        finally:
            delivery.release()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fetch, [*range(40), *range(40)]))


def test_the_producer_keeps_a_part_until_it_is_sent(lender: Lender, receiver: UcxReceiver) -> None:
    held = np.full(4 * MIB, 7, np.uint8)
    lender.parts["part"] = pa.py_buffer(held)
    lender.returned["part"] = lambda: held.fill(9)
    assert (np.frombuffer(payload(receiver.fetch("part", 20)), np.uint8) == 7).all()
    assert lender.wait_for_end("part") is None
    assert (held == 9).all()


@pytest.mark.parametrize("error", [NotFoundError("no such part"), PermissionDeniedError("foreign"), UnavailableError("later")])
def test_errors_come_as_the_producer_raised_them(lender: Lender, receiver: UcxReceiver, error: HeadraceError) -> None:
    lender.errors["part"] = error
    with pytest.raises(type(error), match=str(error)):
        receiver.fetch("part", 20)
    lender.parts["other"] = contents(9)
    assert payload(receiver.fetch("other", 20)).equals(contents(9)), "the connection is as good as before"
