"""UCX among the transports: where it is taken, and what is left where it is not."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from headrace.errors import NotFoundError, UserError
from headrace.preprocessor.payload.payload_store import PayloadStore
from headrace.preprocessor.server import PayloadServicer, payload_servers
from headrace.ticket import make_ticket
from headrace.transport.ucx_library import UcxError
from headrace.transport.ucx_server import UcxServer

MIB = 1 << 20


@pytest.fixture
def offer(make_producer: Any) -> Iterator[Callable[..., tuple[Any, UcxServer]]]:
    """(**options) -> (a Producer that offers UCX as well, its UCX server)"""
    with ExitStack() as stack:

        def make(**options: Any) -> tuple[Any, UcxServer]:
            producer = make_producer(**options)
            server = UcxServer(functools.partial(producer.servicer.lend, transport="ucx"))
            producer._run(server.start())
            stack.callback(lambda: producer._run(server.stop()))
            producer.servicer.offer.ucx_port, producer.servicer.offer.ucx_token = server.port, server.token
            return producer, server

        yield make


def test_ucx_is_taken_where_there_is_no_shared_memory(
    offer: Any, make_client: Any, make_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    producer, _ = offer(shared=False, with_checksum=True)
    producer.add("part", make_rows([MIB, 5], 7))
    with caplog.at_level(logging.INFO):
        client = make_client()
        parts = [client.fetch(producer.endpoint, "part") for _ in range(2)]
    for part in parts:
        assert part.batches[0].equals(make_rows([MIB, 5], 7))
        assert part.delivery.transport.startswith("ucx:")
        part.delivery.release()
    assert producer.servicer.num_parts == {"ucx": 2}
    chosen = [record.getMessage() for record in caplog.records if "receiving" in record.getMessage()]
    reason = 'reason="shared_memory: the preprocessor has no shared memory"'
    assert chosen == [f"receiving endpoint={producer.endpoint} transport=ucx {reason}"]


def test_a_rank_gets_its_columns_through_ucx(offer: Any, make_client: Any, make_rows: Any) -> None:
    producer, _ = offer(with_checksum=True)
    producer.add("part", make_rows([MIB, 5], 7))
    client = make_client("ucx", columns=("input_ids", "labels"))
    part = client.fetch(producer.endpoint, "part")
    assert part.batches[0].equals(make_rows([MIB, 5], 7).select(["input_ids", "labels"]))
    assert part.num_bytes < MIB // 100
    part.delivery.release()


def test_flight_is_left_where_the_ucx_server_is_gone(
    offer: Any, make_client: Any, make_batch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    producer, server = offer(shared=False)
    producer.add("part", make_batch(MIB, 7))
    client = make_client("ucx", "flight")
    assert client.fetch(producer.endpoint, "part").delivery.transport.startswith("ucx:")
    producer._run(server.stop())
    for _ in range(2):
        assert client.fetch(producer.endpoint, "part").delivery.transport == "flight"
    reasons = [record.getMessage() for record in caplog.records if "transport is lost" in record.getMessage()]
    assert len(reasons) == 1


def test_flight_is_left_without_the_package(
    offer: Any, make_client: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        raise UcxError("ucxx, the extra `rdma`, is not usable")

    producer, _ = offer(shared=False)
    producer.add("part", make_batch(MIB, 7))
    monkeypatch.setattr("headrace.transport.ucx_library.load", fail)
    with caplog.at_level(logging.INFO):
        client = make_client("ucx", "flight")
        for _ in range(2):
            assert client.fetch(producer.endpoint, "part").delivery.transport == "flight"
    assert caplog.text.count("the extra `rdma`, is not usable") == 1
    with pytest.raises(UserError, match=r"none of the transports asked for .* the extra `rdma`"):
        make_client("ucx").fetch(producer.endpoint, "part")


def test_a_ticket_without_its_jobs_signature_brings_nothing(offer: Any, make_client: Any, make_batch: Any) -> None:
    producer, _ = offer(shared=False, signed=True)
    ticket = make_ticket("job", "0/0", bytes(32))
    producer.add(ticket, make_batch(MIB, 7))
    client = make_client("ucx")
    for wrong in (make_ticket("job", "0/0", bytes(31) + b"1"), make_ticket("foreign", "0/0", bytes(32)), "job/0/0"):
        with pytest.raises(NotFoundError, match=r"does not bear the signature|is not known here"):
            client.fetch(producer.endpoint, wrong)
    assert client.fetch(producer.endpoint, ticket).delivery.transport.startswith("ucx:")


@pytest.mark.parametrize("with_ucx", [False, True])
async def test_a_preprocessor_offers_it_where_it_is_told_to(with_ucx: bool) -> None:
    servicer = PayloadServicer(PayloadStore(MIB), lambda _: None)
    async with payload_servers("127.0.0.1:0", servicer, None, with_ucx=with_ucx):
        assert bool(servicer.offer.ucx_port) == bool(servicer.offer.ucx_token) == with_ucx
        assert servicer.offer.flight_port


async def test_a_preprocessor_serves_without_it_where_it_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "none-such")
    servicer = PayloadServicer(PayloadStore(MIB), lambda _: None)
    async with payload_servers("127.0.0.1:0", servicer, None, with_ucx=True):
        assert not servicer.offer.ucx_port
    assert caplog.text.count("ucx is not offered") == 1
