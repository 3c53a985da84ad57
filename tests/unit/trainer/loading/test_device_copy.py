"""Values on their way to a device: every tensor in them goes, and all else stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from headrace.trainer.loading.device_copy import DeviceCopy, to_device

META, CPU = torch.device("meta"), torch.device("cpu")


class Pair(NamedTuple):
    rows: Tensor
    number: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    pair: Pair
    by_unit: dict[str, Any]
    lengths: tuple[int, ...] = (1, 2)


def layout() -> Layout:
    return Layout(pair=Pair(torch.arange(3), 3), by_unit={"vision": None, "audio": [torch.ones(2), slice(0, 4)]})


def test_tensors_at_any_depth_are_moved_and_the_rest_is_kept() -> None:
    moved = to_device(layout(), META)
    assert moved.pair.rows.device == moved.by_unit["audio"][0].device == META
    assert (moved.pair.number, moved.lengths) == (3, (1, 2))
    assert (moved.by_unit["vision"], moved.by_unit["audio"][1]) == (None, slice(0, 4))
    assert isinstance(moved.pair, Pair)


@pytest.mark.parametrize("begin", [lambda value: to_device(value, CPU), lambda value: DeviceCopy(CPU).begin(value).wait()])
def test_what_is_there_already_is_not_copied(begin: Any) -> None:
    value = layout()
    assert begin(value).pair.rows is value.pair.rows
