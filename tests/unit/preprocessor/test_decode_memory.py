"""Threads that decode share one budget of memory: who needs more than is free waits, and nobody is refused."""

from __future__ import annotations

import io
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from headrace.preprocessor import audio, image
from headrace.preprocessor.decode_memory import DecodeMemory, decoding_within
from headrace.spec import AudioSpec, ImageSpec

MIB = 1 << 20
TOGETHER_S = 0.3  # how long a thread waits for another one to decode beside it


def test_no_more_than_there_is_is_taken_and_what_is_larger_is_alone() -> None:
    memory, lock, taken = DecodeMemory(10), threading.Lock(), list[int]()

    def take(size: int) -> None:
        with memory.room_for(size):
            with lock:
                taken.append(size)
                assert sum(taken) <= 10 or sum(taken) == max(taken), "beside the largest, others take nothing"
            with lock:
                taken.remove(size)

    sizes = random.Random(0).choices([0, 1, 4, 6, 10, 25], k=2000)
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(take, sizes))) == len(sizes)


def test_who_fails_gives_back() -> None:
    memory = DecodeMemory(10)
    with pytest.raises(ZeroDivisionError), memory.room_for(10):
        1 / 0  # noqa: B018
    with memory.room_for(10):
        pass


def photo() -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((1000, 800)).convert("RGBA").save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def sound() -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(160_000) / 30), 16_000, format="FLAC")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("module", "data", "spec"), [(image, photo(), ImageSpec()), (audio, sound(), AudioSpec())], ids=["image", "sound"]
)
def test_media_are_decoded_side_by_side_only_where_there_is_room(
    module: Any, data: bytes, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them holds more than 6 MiB, and less than 12."""
    read = module._read
    meeting = threading.Barrier(2)
    met: list[bool] = []

    def read_and_meet(*args: Any) -> Any:
        try:
            meeting.wait(TOGETHER_S)
            met.append(True)
        except threading.BrokenBarrierError:
            met.append(False)
        return read(*args)

    monkeypatch.setattr(module, "_read", read_and_meet)
    with ThreadPoolExecutor(2) as pool:
        with decoding_within(12 * MIB):
            list(pool.map(lambda _: module.decode(data, spec), range(2)))
        assert met == [False, False]
        meeting.reset()
        with decoding_within(64 * MIB):
            list(pool.map(lambda _: module.decode(data, spec), range(2)))
        assert met[2:] == [True, True]
