"""Buffers for received payloads: used again, never while somebody holds them, and bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.transport.ucx_buffers import ReceiveBuffers

MIB = 1 << 20


def test_the_smallest_block_that_fits_is_used_again() -> None:
    allocated: list[int] = []

    def allocate(num_bytes: int) -> memoryview:
        allocated.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    buffers = ReceiveBuffers(allocate)
    leases = [buffers.take(size) for size in (5 * MIB, 2 * MIB, 9 * MIB)]
    for lease in leases:
        lease()
    again = buffers.take(MIB + 1)
    assert len(again.view) == MIB + 1
    assert buffers.idle_bytes == 14 * MIB
    assert allocated == [5 * MIB, 2 * MIB, 9 * MIB]


def test_a_size_that_differs_little_uses_the_same_block() -> None:
    buffers = ReceiveBuffers()
    buffers.take(MIB - 1000)()
    buffers.take(MIB)()
    assert buffers.idle_bytes == MIB


def test_a_lease_that_is_dropped_takes_its_block_with_it() -> None:
    buffers = ReceiveBuffers()
    buffers.take(MIB)
    assert buffers.idle_bytes == 0


def test_where_there_is_no_memory_the_allocator_says_so() -> None:
    def allocate(num_bytes: int) -> memoryview:
        raise MemoryError

    with pytest.raises(MemoryError):
        ReceiveBuffers(allocate).take(1)


@given(st.lists(st.tuples(st.integers(1, 4 * MIB), st.integers(0, 5)), max_size=40), st.integers(0, 8))
def test_no_two_leases_overlap_and_what_lies_idle_is_bounded(steps: list[tuple[int, int]], max_idle_mib: int) -> None:
    """Each step takes a lease and marks it, and gives one of the older ones back."""
    buffers = ReceiveBuffers(lambda num_bytes: memoryview(bytearray(num_bytes)), max_idle_mib * MIB)
    held = []
    for k, (num_bytes, which) in enumerate(steps):
        lease = buffers.take(num_bytes)
        mark = k.to_bytes(1, "big")
        lease.view[0:1] = lease.view[-1:] = mark
        held.append((lease, mark))
        if which < len(held):
            lease, mark = held.pop(which)
            assert (bytes(lease.view[0:1]), bytes(lease.view[-1:])) == (mark, mark)
            lease()
            lease()
        assert buffers.idle_bytes <= max_idle_mib * MIB
    for lease, mark in held:
        assert bytes(lease.view[0:1]) == mark
