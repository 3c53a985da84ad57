"""The buffer pool: what is used again, when, and how much stays idle."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.loading.buffers import ALIGNMENT, BufferPool, PinnedMemory
from tests.examples import with_examples

MIB = 1 << 20


def test_memory_is_used_again_once_its_last_tensor_is_gone():
    pool = BufferPool(64 * MIB)
    buffer = pool.take(5 * MIB)
    address, view = buffer.data_ptr(), buffer[MIB:].view(torch.float16)[7:]
    del buffer
    other = pool.take(5 * MIB)
    assert other.data_ptr() != address, "the view is still read"
    del view
    assert pool.take(5 * MIB).data_ptr() == address


def test_what_autograd_has_saved_is_not_used_again():
    pool = BufferPool(64 * MIB)
    buffer = pool.take(MIB).view(torch.float32).fill_(3.0)
    address = buffer.data_ptr()
    weight = torch.ones(len(buffer), requires_grad=True)
    product = (buffer * weight).sum()
    del buffer
    pool.take(MIB).fill_(0)
    product.backward()
    assert (weight.grad == 3.0).all()
    del product
    assert address in {buffer.data_ptr() for buffer in [pool.take(MIB), pool.take(MIB)]}


def test_memory_that_only_a_cycle_holds_comes_back_whenever_that_is_collected():
    """Maybe while the pool itself works: no lock may be in the way."""
    pool = BufferPool(64 * MIB)
    gc.disable()
    try:
        cycle = [pool.take(MIB)]
        address = cycle[0].data_ptr()
        cycle.append(cycle)
        del cycle
        with pool._lock:
            gc.collect()
    finally:
        gc.enable()
    assert pool.take(MIB).data_ptr() == address


def test_the_smallest_buffer_that_fits_is_taken():
    pool = BufferPool(64 * MIB)
    large, small = pool.take(20 * MIB), pool.take(3 * MIB)
    addresses = large.data_ptr(), small.data_ptr()
    del large, small
    again = pool.take(2 * MIB), pool.take(2 * MIB)
    assert tuple(buffer.data_ptr() for buffer in again) == addresses[::-1]


@with_examples(50)
@given(sizes=st.lists(st.integers(0, 6 * MIB), max_size=12), limit=st.integers(0, 16 * MIB), num_kept=st.integers(0, 3))
def test_buffers_are_whole_apart_aligned_and_bounded(sizes, limit, num_kept):
    """Up to `num_kept` are in use at a time; their contents are theirs alone."""
    pool, kept = BufferPool(limit), []
    for number, size in enumerate(sizes):
        buffer = pool.take(size)
        assert pool.idle_bytes <= limit
        assert (buffer.dtype, len(buffer)) == (torch.uint8, size)
        assert size == 0 or buffer.data_ptr() % ALIGNMENT == 0
        kept.append((number, buffer.fill_(number)))
        del buffer, kept[: len(kept) - num_kept]
        assert all((tensor == mark).all() for mark, tensor in kept)


def test_no_more_stays_idle_than_allowed():
    pool = BufferPool(10 * MIB)
    buffers = [pool.take(3 * MIB) for _ in range(8)]
    del buffers
    pool.take(MIB)
    assert pool.idle_bytes <= 10 * MIB + 4 * MIB, "what just came back is looked at when the next is taken"
    pool.take(MIB)
    assert 0 < pool.idle_bytes <= 14 * MIB


def test_growing_sizes_leave_no_small_buffers_behind():
    pool = BufferPool(1 << 30)
    for size in range(1, 12):
        pool.take(size * 2 * MIB)
    assert pool.idle_bytes == 24 * MIB


def test_used_memory_is_warm():
    """The second use touches no new page."""
    import resource

    pool = BufferPool(64 * MIB)
    np.asarray(pool.take(32 * MIB))[:] = 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.asarray(pool.take(32 * MIB))[:] = 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 32 * MIB // 4096 // 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
def test_pinned_buffers_are_pinned():
    pinned = PinnedMemory()
    buffer = BufferPool(0, pinned=pinned).take(MIB)
    assert buffer.is_pinned()
    assert pinned.used_bytes >= MIB
    del buffer
    pinned.release_idle()
    assert pinned.allocated_bytes == pinned.used_bytes


class EmulatedPinned(PinnedMemory):
    """EMULATED: blocks of powers of two that nobody gives back, as in torch's pool, of memory that is not locked."""

    def __init__(self) -> None:
        self.idle: list[int] = []
        self.used: list[int] = []
        self.most_idle = self.num_released = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        block = 1 << max(0, num_bytes - 1).bit_length()
        if block in self.idle:
            self.idle.remove(block)
        self.used.append(block)
        array = np.empty(num_bytes, np.uint8)
        weakref.finalize(array, self._back, block).atexit = False
        return torch.from_numpy(array)

    def _back(self, block: int) -> None:
        self.used.remove(block)
        self.idle.append(block)

    @property
    def allocated_bytes(self) -> int:
        return sum(self.idle) + sum(self.used)

    @property
    def used_bytes(self) -> int:
        return sum(self.used)

    def release_idle(self) -> None:
        self.num_released += 1
        self.idle.clear()


@with_examples(50)
@given(steps=st.lists(st.lists(st.integers(1, MIB), min_size=1, max_size=6), max_size=12), limit=st.integers(0, MIB))
def test_pinned_memory_that_is_idle_is_bounded(steps, limit):
    """Steps of one size after the other would else each leave their blocks behind."""
    pinned = EmulatedPinned()
    pool, most_used = BufferPool(limit, pinned=pinned), 0
    for sizes in steps:
        buffers = []
        for size in sizes:
            buffers.append(pool.take(size))
            most_used = max(most_used, pinned.used_bytes)
            assert sum(pinned.idle) <= limit + most_used
        del buffers


def test_steps_of_equal_sizes_lock_no_pages_anew():
    pinned = EmulatedPinned()
    pool = BufferPool(0, pinned=pinned)
    for _ in range(5):
        buffers = [pool.take(size) for size in (MIB, 3 * MIB, 3 * MIB)]
        del buffers
    assert pinned.num_released == 0
    assert pinned.allocated_bytes == 9 * MIB
