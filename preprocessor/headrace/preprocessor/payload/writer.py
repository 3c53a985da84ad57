"""Writes payload: pixels and sound are decoded where trainers will read them, and all else is written around them.

A part is an Arrow IPC stream. Headers tell all sizes, so its layout is known before anything is decoded: the stream is written
first, with gaps for the values of patches and mel, and decoding fills the gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headrace.preprocessor.payload.arena import Arena, Slot
from headrace.preprocessor.payload.part import Payload
from headrace.quarantine import Rejected
from headrace.transport.base import checksum

_Value = TypeVar("_Value", np.uint8, np.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedPayload:
    """A payload whose media are still to be decoded into it. Pass it to `PayloadWriter.finish` or `discard` in the end."""

    patches: NDArray[np.uint8]
    """View of `data` to decode patches into, of the shape given to `reserve`."""
    mel: NDArray[np.float16]
    """View of `data` to decode mel frames into, of the shape given to `reserve`."""
    data: pa.Buffer
    slot: Slot | None


class PayloadWriter:
    """Writes parts into the arena, or onto the heap if there is no arena or it has no room. Thread-safe."""

    def __init__(self, arena: Arena | None = None, *, with_checksum: bool = False) -> None:
        self._arena = arena
        self._with_checksum = with_checksum

    def reserve(self, draft: pa.RecordBatch, patches: NDArray[np.uint8], mel: NDArray[np.float16]) -> ReservedPayload:
        """Write a batch except for the values of `patches` and `mel`, the arrays of which two of its columns are views.

        The two arrays are placeholders for the values to come, and are neither read nor copied.
        """
        sink = _Sink([patches, mel])
        with pa.PythonFile(sink, mode="w") as file:
            _write_stream(file, draft)
        data, slot = self._allocate(sink.num_bytes)
        memory = np.frombuffer(data, np.uint8)
        for begin, piece in sink.pieces:
            memory[begin : begin + len(piece)] = np.frombuffer(piece, np.uint8)
        patches, mel = _view(memory, sink.begins[0], patches), _view(memory, sink.begins[1], mel)
        return ReservedPayload(patches=patches, mel=mel, data=data, slot=slot)

    def finish(self, reserved: ReservedPayload, num_samples: int, rejected: tuple[Rejected, ...]) -> Payload:
        """Return the payload of a reservation whose media have been filled in."""
        return self._payload(reserved.data, reserved.slot, num_samples, rejected)

    def discard(self, unused: ReservedPayload | Payload) -> None:
        """Free the memory of a reservation or a payload that is not used."""
        if unused.slot is not None and self._arena is not None:
            self._arena.free(unused.slot)

    def write(self, batch: pa.RecordBatch, rejected: tuple[Rejected, ...]) -> Payload:
        """Write a complete batch, whose values are copied once."""
        measured = pa.MockOutputStream()  # measures the size without a copy
        _write_stream(measured, batch)
        data, slot = self._allocate(measured.size())
        with pa.FixedSizeBufferWriter(data) as sink:
            _write_stream(sink, batch)
        return self._payload(data, slot, batch.num_rows, rejected)

    def _allocate(self, num_bytes: int) -> tuple[pa.Buffer, Slot | None]:
        slot = self._arena.allocate(num_bytes) if self._arena is not None else None
        return (slot.buffer if slot is not None else pa.allocate_buffer(num_bytes)), slot

    def _payload(self, data: pa.Buffer, slot: Slot | None, num_samples: int, rejected: tuple[Rejected, ...]) -> Payload:
        crc32 = checksum(data) if self._with_checksum else None
        return Payload(data=data, num_samples=num_samples, rejected=rejected, slot=slot, crc32=crc32)


class _Sink:
    """A file that keeps what is written to it; of the arrays `gaps`, known by their address, it keeps only the offset."""

    closed = False

    def __init__(self, gaps: list[NDArray[np.uint8] | NDArray[np.float16]]) -> None:
        self._gaps = {gap.ctypes.data: number for number, gap in enumerate(gaps) if gap.nbytes}
        self.begins = [0] * len(gaps)
        self.pieces: list[tuple[int, bytes]] = []
        self.num_bytes = 0

    def write(self, data: pa.Buffer | bytes) -> int:
        buffer = pa.py_buffer(data)
        gap = self._gaps.get(buffer.address)
        if gap is None:
            self.pieces.append((self.num_bytes, buffer.to_pybytes()))
        else:
            self.begins[gap] = self.num_bytes
        self.num_bytes += buffer.size
        return int(buffer.size)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        """Do nothing, since nothing is buffered."""

    def close(self) -> None:
        """Do nothing, since no file is open."""


def _view(memory: NDArray[np.uint8], begin: int, like: NDArray[_Value]) -> NDArray[_Value]:
    return memory[begin : begin + like.nbytes].view(like.dtype).reshape(like.shape)


def _write_stream(sink: pa.NativeFile, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
