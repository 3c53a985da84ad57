"""Copies of packed microbatches to the device that overlap with computation: on a GPU by a side stream, from pinned memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.trainer.loading.collate import PAYLOAD, PackedMicrobatch


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A microbatch on its device whose copy may still be in progress."""

    microbatch: PackedMicrobatch
    end: torch.cuda.Event | None
    """Recorded behind the copies; None: they are complete."""

    def wait(self) -> PackedMicrobatch:
        """Return the microbatch after making the caller's current stream wait for the copy; the host does not wait."""
        if self.end is not None:
            stream = torch.cuda.current_stream(self.microbatch.patches.device)
            stream.wait_event(self.end)
            for name in PAYLOAD:
                getattr(self.microbatch, name).record_stream(stream)  # its memory is not reused before this stream has read it
        return self.microbatch


class DeviceCopy:
    """Copies microbatches to a device, one after the other, on a CUDA stream of its own where the device is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self, microbatch: PackedMicrobatch) -> PendingCopy:
        """Start the copy of a microbatch; tensors already on the device are not copied. From any thread, one at a time."""
        if self._stream is None:
            return PendingCopy(microbatch.to(self._device), end=None)
        with torch.cuda.stream(self._stream):
            return PendingCopy(microbatch.to(self._device), self._stream.record_event())
