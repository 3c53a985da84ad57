"""Memory for large tensors, in huge pages where there are any: tensors like others."""

from __future__ import annotations

import pytest
import torch

from headrace.trainer.pipeline.huge_pages import empty_in_huge_pages
from tests.emulated_device import DEVICE, DeviceTensor, emulated_device

LENGTHS = [0, 1, 1 << 20, (1 << 20) + 1, 3 << 20]  # 4 MiB have huge pages


@pytest.mark.parametrize("length", LENGTHS)
def test_it_holds_what_is_written_to_each_element(length: int) -> None:
    tensor = empty_in_huge_pages(length)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((length,), torch.float32, True)
    assert torch.equal(tensor.copy_(torch.arange(float(length))), torch.arange(float(length)))


def test_a_view_keeps_it() -> None:
    end = empty_in_huge_pages(1 << 20).fill_(3.0)[-2:]
    assert empty_in_huge_pages(1 << 20).fill_(4.0).sum() == 4 << 20
    assert end.tolist() == [3.0, 3.0]


def test_on_a_device_it_is_memory_of_the_device() -> None:
    with emulated_device():
        assert isinstance(empty_in_huge_pages(1 << 20, DEVICE), DeviceTensor)
