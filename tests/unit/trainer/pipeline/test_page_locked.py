"""Blocks of page-locked memory. Without a GPU, what locks memory is a record of what would be locked."""

from __future__ import annotations

import logging

import pytest
import torch

from headrace.trainer.pipeline import page_locked
from headrace.trainer.pipeline.page_locked import PageLockedBlocks

BLOCK = 1 << 16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locked, "BLOCK_BYTES", BLOCK)


def test_tensors_of_any_size_share_blocks_and_no_memory() -> None:
    locked: dict[int, int] = {}
    blocks = PageLockedBlocks(lambda address, size: locked.setdefault(address, size) and 0, locked.pop)
    shapes = [(3,), (), (0, 4), (100, 7), (BLOCK,), (2, 2)]
    tensors = [blocks.take(torch.Size(shape), torch.float32).fill_(number) for number, shape in enumerate(shapes)]
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert (tensor == number).all(), "what was taken later has not overwritten it"
        assert tensor.data_ptr() % 4 == 0
    assert sorted(locked.values()) == [BLOCK, BLOCK, 4 * BLOCK]
    for tensor in tensors:
        if tensor.numel():
            places = [range(address, address + size) for address, size in locked.items()]
            assert any(tensor.data_ptr() in place and tensor.data_ptr() + tensor.nbytes - 1 in place for place in places)
    del tensors, tensor
    blocks.close()
    assert not locked


def test_memory_that_cannot_be_locked_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    blocks = PageLockedBlocks(lambda *_: 2, pytest.fail)
    with caplog.at_level(logging.WARNING):
        assert blocks.take(torch.Size((5,)), torch.float32).fill_(1).sum() == 5
    assert "memory for checkpoints is not page-locked num_bytes=65536 cuda_error=2" in caplog.text
    blocks.close()
