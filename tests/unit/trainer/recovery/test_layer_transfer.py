"""Who sends what to whom after a change of the nodes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, UnrecoverableError
from headrace.trainer.recovery.layer_transfer import CHUNK_BYTES, Transfer, plan_transfers, receive_state, send_state
from headrace.trainer.recovery.state_streams import Stream

RANKS = st.sets(st.integers(0, 5))
MODELS = st.dictionaries(
    st.sampled_from([f"layer.{number}" for number in range(12)]), st.tuples(RANKS, RANKS, st.integers(1, 99))
)

TRANSFER = Transfer(name="layer.0", source=4, target=0)


def test_only_what_is_missing_moves() -> None:
    transfers = plan_transfers({"a": [0, 1, 2], "b": [1]}, {"a": [0, 2], "b": [1]}, {"a": 8, "b": 8})
    assert [(item.name, item.source, item.target) for item in transfers] == [("a", 0, 1)]


def test_several_sources_share_the_sending() -> None:
    sizes = dict.fromkeys("abcd", 10)
    transfers = plan_transfers({name: [2] for name in "abcd"}, {name: [0, 1] for name in "abcd"}, sizes)
    assert sorted(item.source for item in transfers) == [0, 0, 1, 1]


def test_what_nobody_has_any_more_is_named() -> None:
    with pytest.raises(UnrecoverableError, match=r"no node is left that has decoder\.norm\.weight"):
        plan_transfers({"decoder.norm.weight": [0]}, {"decoder.norm.weight": []}, {"decoder.norm.weight": 4})


def test_what_nobody_needs_may_be_lost() -> None:
    assert plan_transfers({"audio.norm": []}, {"audio.norm": []}, {"audio.norm": 4}) == []


@given(MODELS)
def test_everybody_gets_what_it_lacks_once_and_from_a_holder(model: dict[str, tuple[set[int], set[int], int]]) -> None:
    wanted = {name: sorted(needs) for name, (needs, has, _) in model.items() if has or not needs}
    holders = {name: sorted(model[name][1]) for name in wanted}
    sizes = {name: model[name][2] for name in wanted}
    transfers = plan_transfers(wanted, holders, sizes)
    got = {(item.name, item.target) for item in transfers}
    assert len(got) == len(transfers)
    assert got == {(name, rank) for name in wanted for rank in wanted[name] if rank not in holders[name]}
    assert all(item.source in holders[item.name] for item in transfers)


LENGTHS = (7, 7, 7, 1)
MESSAGE_BYTES = 4 * sum(LENGTHS) + 16


@given(st.integers(0, 8 * MESSAGE_BYTES - 1))
def test_a_bit_that_came_otherwise_is_found_wherever_it_is(bit: int) -> None:
    with _connection() as (sending, receiving), _connection() as (sending_on, receiving_at_last):
        send_state(sending, [torch.arange(float(length)) for length in LENGTHS])
        message = bytearray(MESSAGE_BYTES)
        receiving.receive(memoryview(message))
        message[bit // 8] ^= 1 << bit % 8
        sending_on.send(bytes(message))
        with pytest.raises(HeadraceError, match=r"layer\.0 came damaged from node 4"):
            receive_state(receiving_at_last, [torch.empty(length) for length in LENGTHS], TRANSFER)


@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES // 4, CHUNK_BYTES // 4 + 1, 3 * CHUNK_BYTES // 4])
def test_state_arrives_whole_however_many_chunks_it_has(length: int) -> None:
    sent, came = [torch.arange(float(length)), torch.ones(1)], [torch.empty(length), torch.empty(1)]
    with _connection() as (sending, receiving), ThreadPoolExecutor(1) as pool:
        done = pool.submit(send_state, sending, sent)
        receive_state(receiving, came, TRANSFER)
        done.result()
    assert all(map(torch.equal, came, sent))


@contextmanager
def _connection() -> Iterator[tuple[Stream, Stream]]:
    """Both ends of a stream."""
    ends = [Stream(end, 60.0) for end in socket.socketpair()]
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()
