"""What is packed goes to its device beside what is computed there: on a GPU by a stream of its own, from pinned memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.trainer.loading.collate import PAYLOAD, PackedMicrobatch


@dataclass(frozen=True, slots=True)
class OnItsWay:
    """A microbatch on its device, some of it perhaps not yet."""

    microbatch: PackedMicrobatch
    end: torch.cuda.Event | None
    """Of the copies."""

    def arrived(self) -> PackedMicrobatch:
        """The microbatch, for what the caller's stream computes from now on; the host does not wait."""
        if self.end is not None:
            stream = torch.cuda.current_stream(self.microbatch.patches.device)
            stream.wait_event(self.end)
            for name in PAYLOAD:
                getattr(self.microbatch, name).record_stream(stream)  # its memory is not used again before that has run
        return self.microbatch


class DeviceCopy:
    """Copies microbatches to a device, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self, microbatch: PackedMicrobatch) -> OnItsWay:
        """Start a copy; what lies on the device already is not copied. From any thread, one at a time."""
        if self._stream is None:
            return OnItsWay(microbatch.to(self._device), end=None)
        with torch.cuda.stream(self._stream):
            return OnItsWay(microbatch.to(self._device), self._stream.record_event())
