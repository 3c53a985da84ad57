"""Memory in common: what the writer writes is read in place, and pages of blocks that nobody uses are given back."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from headrace.trainer.loading import group_memory
from headrace.trainer.loading.buffers import BufferPool
from headrace.trainer.loading.group_memory import GroupMemory, GroupMemoryView

MIB = 1 << 20


@pytest.fixture
def memory() -> GroupMemory:
    return GroupMemory()


def pages(memory: GroupMemory) -> int:
    """Bytes that the file has pages for."""
    return memory.path.stat().st_blocks * 512


def test_a_tensor_is_read_where_it_was_written(memory: GroupMemory) -> None:
    view = GroupMemoryView(memory.path)
    memory.remove_name()
    pool = BufferPool(16 * MIB, allocate=memory.allocate)
    tensors = [torch.arange(7), torch.rand(3, 4).half(), torch.randint(0, 255, (5, 588), dtype=torch.uint8)]
    for tensor in tensors:
        written = pool.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        written.copy_(tensor)
        place = memory.place(written)
        assert place is not None
        read = view.tensor(place, tuple(tensor.shape), tensor.dtype)
        assert torch.equal(read, tensor)
        written.zero_()
        assert not read.any(), "it is the same memory"
    assert memory.place(torch.arange(7)) is None


def test_a_block_is_reused_and_its_pages_are_given_back_at_the_end(memory: GroupMemory) -> None:
    try:
        pool = BufferPool(16 * MIB, allocate=memory.allocate)
        for _ in range(5):
            pool.take(3 * MIB)
        assert pages(memory) == 4 * MIB
        del pool
        gc.collect()
        assert pages(memory) == 0
    finally:
        memory.remove_name()


@pytest.mark.filterwarnings("ignore:.*fork", "ignore:.*multi-threaded")  # Lance and, from 3.12 on, Python warn of any fork.
def test_a_forked_process_gives_back_no_pages_that_are_in_use(memory: GroupMemory) -> None:
    memory.remove_name()
    block = memory.allocate(MIB)
    assert block is not None
    block[:] = 7
    child = os.fork()
    if child == 0:
        del block
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (block == 7).all()


def test_where_it_has_no_room_the_pool_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_memory, "SHARE", 1 << 60)
    memory = GroupMemory()
    memory.remove_name()
    tensor = BufferPool(16 * MIB, allocate=memory.allocate).take(100)
    tensor.fill_(1)
    assert memory.place(tensor) is None


def test_without_such_a_folder_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_memory, "FOLDER", Path("/proc"))
    with pytest.raises(OSError, match="headrace-group"):
        GroupMemory()
