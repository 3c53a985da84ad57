"""A clock that waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class DeviceClock:
    """Tells the seconds at which a device has done all that it was given."""

    def __init__(self, device: torch.device, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._now_s = now_s

    def __call__(self) -> float:
        """Return the present seconds; only differences mean anything."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now_s()
