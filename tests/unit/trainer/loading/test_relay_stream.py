"""What the ranks of a host have to say is sent in few messages of bounded size."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.outbox import MAX_BATCH_BYTES
from headrace.trainer.loading.relay_stream import RelayStream
from headrace.v1 import common_pb2, sessions_pb2


@pytest.mark.parametrize("num_refused", [0, 5, 2_000, 20_000])
def test_commits_of_many_refused_samples_do_not_make_one_message_of_any_size(num_refused: int) -> None:
    """The service refuses a message above its limit, and with it all ranks of the host."""
    is_over = threading.Event()

    def relay(_requests: Iterator[sessions_pb2.RelayRequest]) -> Iterator[Any]:
        is_over.wait(20)  # what is to be sent is read below, when all have said theirs
        yield from ()

    stub: Any = SimpleNamespace(Relay=relay)
    stream = RelayStream(stub)
    rejections = [common_pb2.Rejection(name=f"source/shard/{n:050}", reason="corrupt_media") for n in range(num_refused)]
    for rank in range(8):
        stream.commit(sessions_pb2.CommitRequest(session=f"job/{rank}", step=1, rejections=rejections))
    messages = []
    sent = stream._merged()
    while sum(len(message.commits) for message in messages) < 8:
        messages.append(next(sent))
    assert [commit.session for message in messages for commit in message.commits] == [f"job/{rank}" for rank in range(8)]
    assert all(message.ByteSize() <= MAX_BATCH_BYTES or len(message.commits) == 1 for message in messages)
    assert len(messages) == {0: 1, 5: 1, 2_000: 2, 20_000: 8}[num_refused]
    is_over.set()
