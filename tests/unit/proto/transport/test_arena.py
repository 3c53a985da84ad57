"""The arena: disjoint slots, warm pages, readers' locks, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UnavailableError
from headrace.preprocessor.payload.arena import Arena, Slot, open_arena, remove_stale
from headrace.transport.shared_memory import ALIGNMENT, ArenaError, ArenaReader, socket_path
from tests.examples import with_examples

MIB = 1 << 20


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(4 * MIB, tmp_path)
    yield arena
    arena.close()


@pytest.fixture
def reader(arena: Arena) -> ArenaReader:
    return ArenaReader(arena.path.name, arena.path.parent)


def allocate(arena: Arena, num_bytes: int = MIB, value: int = 1) -> Slot:
    """A slot filled with `value`."""
    slot = arena.allocate(num_bytes)
    assert slot is not None
    np.frombuffer(slot.buffer, np.uint8)[:] = value
    return slot


def view(reader: ArenaReader, slot: Slot) -> tuple[np.ndarray, Callable[[], None]]:
    buffer, let_go = reader.view(slot.offset, slot.buffer.size, slot.generation)
    return np.frombuffer(buffer, np.uint8), let_go


def test_a_reader_sees_what_was_written_and_cannot_write(arena: Arena, reader: ArenaReader) -> None:
    values, _ = view(reader, allocate(arena, value=7))
    assert len(values) == MIB
    assert (values == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1
    assert reader.token == arena.token


def test_the_same_pages_are_used_over_and_over(arena: Arena) -> None:
    for _ in range(50):
        slots = [allocate(arena), allocate(arena)]
        for slot in slots:
            arena.free(slot)
    statistics = arena.statistics()
    assert statistics.used_bytes == 0
    assert statistics.high_water_bytes == 2 * (MIB + ALIGNMENT)
    assert statistics.cold_bytes == statistics.high_water_bytes + ALIGNMENT


def test_a_full_arena_has_no_slot_until_one_is_freed(arena: Arena) -> None:
    slots = [allocate(arena, MIB - ALIGNMENT) for _ in range(4)]
    assert arena.allocate(1) is None
    arena.free(slots[1])
    assert arena.allocate(MIB) is None
    assert allocate(arena, MIB - ALIGNMENT).offset == slots[1].offset


@with_examples(60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9 * ALIGNMENT)), max_size=60))
def test_slots_are_aligned_and_disjoint_and_merge_to_one_hole(tmp_path_factory: pytest.TempPathFactory, run: list) -> None:
    arena = Arena(64 * ALIGNMENT, tmp_path_factory.mktemp("arena"))
    live: list[tuple[Slot, int]] = []
    for number, (frees, size) in enumerate(run):
        if frees and live:
            slot, value = live.pop(size % len(live))
            assert (np.frombuffer(slot.buffer, np.uint8) == value).all()
            arena.free(slot)
        elif (slot_or_none := arena.allocate(size)) is not None:
            np.frombuffer(slot_or_none.buffer, np.uint8)[:] = number
            live.append((slot_or_none, number))
        assert arena.statistics().used_bytes == sum(slot.num_bytes for slot, _ in live)
    for slot, value in live:
        assert slot.offset % ALIGNMENT == 0
        assert (np.frombuffer(slot.buffer, np.uint8) == value).all()
        arena.free(slot)
    assert arena.allocate(63 * ALIGNMENT) is not None, "all of it, less one head"
    arena.close()


def test_a_slot_that_a_reader_holds_is_not_used_again(arena: Arena, reader: ArenaReader) -> None:
    slot = allocate(arena, value=7)
    values, let_go = view(reader, slot)
    arena.free(slot)
    assert arena.is_held(slot)
    assert arena.lingering_bytes() == slot.num_bytes
    assert allocate(arena, value=8).offset != slot.offset
    assert (values == 7).all()
    let_go()
    assert arena.lingering_bytes() == 0
    assert allocate(arena, value=9).offset == slot.offset


def test_a_slot_is_held_until_the_last_holder_has_let_go_and_nobody_lets_go_twice(arena: Arena, reader: ArenaReader) -> None:
    slot = allocate(arena)
    (_, first), (_, second) = view(reader, slot), view(reader, slot)
    first()
    first()
    assert arena.is_held(slot)
    second()
    assert not arena.is_held(slot)


def test_readers_of_several_processes_or_clients_count_one_by_one(arena: Arena, reader: ArenaReader) -> None:
    other = ArenaReader(arena.path.name, arena.path.parent)
    slot = allocate(arena)
    (_, first), (_, second) = view(reader, slot), view(other, slot)
    first()
    assert arena.is_held(slot)
    second()
    assert not arena.is_held(slot)


def test_a_lock_lasts_as_long_as_any_view_though_the_reader_is_gone(arena: Arena) -> None:
    slot = allocate(arena, value=7)
    values, _ = view(ArenaReader(arena.path.name, arena.path.parent), slot)
    assert arena.is_held(slot)
    assert (values == 7).all()
    del values, _
    assert not arena.is_held(slot)


def test_who_comes_too_late_for_a_slot_is_told(arena: Arena, reader: ArenaReader) -> None:
    slot = allocate(arena)
    arena.free(slot)
    with pytest.raises(UnavailableError, match="another payload"):
        view(reader, slot)
    assert allocate(arena).offset == slot.offset
    with pytest.raises(UnavailableError, match="another payload"):
        view(reader, slot)
    assert not arena.is_held(slot), "the attempt left no lock"


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 8), (-64, 8), (64, 5 * MIB), (96, 8), (64, -1), (1 << 60, 8)])
def test_a_slot_outside_of_the_arena_is_refused(reader: ArenaReader, offset: int, num_bytes: int) -> None:
    with pytest.raises(UnavailableError, match="does not lie in the arena"):
        reader.view(offset, num_bytes, 1)


@pytest.mark.parametrize("name", ["../etc/passwd", "headrace-1-xy", "", "headrace-1-ab/../x", "headrace-1-00"])
def test_only_an_arena_is_opened_as_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "headrace-1-00").write_bytes(bytes(4096))
    with pytest.raises(ArenaError):
        ArenaReader(name, tmp_path)


def test_what_is_mapped_stays_readable_after_the_owner_is_gone(tmp_path: Path) -> None:
    arena = Arena(MIB, tmp_path)
    values, _ = view(ArenaReader(arena.path.name, tmp_path), allocate(arena, 1000, value=3))
    arena.close()
    assert list(tmp_path.iterdir()) == []
    del arena
    assert (values == 3).all()


SMALL_TMPFS = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m tmpfs "$0" && exec "$@"']

FILLING = """
import pathlib, sys
from headrace.preprocessor.payload.arena import Arena
arena = Arena(8 << 20, pathlib.Path(sys.argv[1]))
assert arena.allocate(4 << 20) is None
assert arena.statistics().used_bytes == 0
memoryview(arena.allocate(1 << 20).buffer).cast("B")[:] = bytes(1 << 20)
assert arena.allocate(1 << 20) is None
print("done")
"""


@pytest.mark.skipif(
    subprocess.run([*SMALL_TMPFS, "/mnt", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs a mount namespace for a /dev/shm that is full",
)
def test_no_memory_behind_the_file_is_no_slot_and_no_crash(tmp_path: Path) -> None:
    command = [*SMALL_TMPFS, str(tmp_path), sys.executable, "-c", FILLING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_too_little_shared_memory_is_told_with_the_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_arena(1 << 60, tmp_path) is None
    assert "--shm-size" in caplog.text
    assert open_arena(MIB, tmp_path / "no-such-folder") is None
    assert list(tmp_path.iterdir()) == []


OWNER = """
import pathlib, sys
from headrace.preprocessor.payload.arena import Arena
arena = Arena(1 << 20, pathlib.Path(sys.argv[1]))
arena.path.with_name(arena.path.name + ".sock").touch()
print(arena.path.name, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_owner_left_is_removed_and_nothing_else(tmp_path: Path, arena: Arena) -> None:
    notes = tmp_path / "headrace-notes"
    notes.touch()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        left = tmp_path / owner.stdout.readline().strip()
        assert remove_stale(tmp_path) == [], "both owners live"
        owner.send_signal(signal.SIGKILL)
    assert left.exists()
    successor = open_arena(MIB, tmp_path)
    assert successor is not None
    assert sorted(tmp_path.iterdir()) == sorted([arena.path, successor.path, notes])
    assert not socket_path(left).exists()
    successor.close()
