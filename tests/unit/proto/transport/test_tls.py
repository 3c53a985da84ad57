"""Payload over TLS: both ports of a preprocessor, its health, and new papers for its Flight server."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from headrace.cli.main import main
from headrace.cli.run import preprocessor, reorder
from headrace.errors import EndpointError, UserError
from headrace.identity import PREPROCESSOR, REORDER, TLS, Identity, Papers
from headrace.transport import flight_renewal
from headrace.transport.flight import FlightReceiver
from headrace.v1 import payload_pb2
from tests.papers import make_cluster_papers

MIB = 1 << 20


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS, "")  # what a command sets is undone as well


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    return make_cluster_papers(tmp_path / "ours")


@pytest.mark.parametrize("transport", ["shared_memory", "flight"])
def test_parts_come_from_a_preprocessor_that_speaks_tls(
    make_producer: Any, make_client: Any, make_batch: Any, papers: Path, transport: str
) -> None:
    producer = make_producer(identity=Identity(papers / "preprocessor"))
    producer.add("part", make_batch(MIB, 7))
    part = make_client(transport, tls=papers / "trainer").fetch(producer.endpoint, "part")
    assert part.delivery.transport == transport
    assert part.batches[0].equals(make_batch(MIB, 7))


def test_no_payload_is_in_the_clear(make_producer: Any, make_client: Any, make_wire: Any, make_batch: Any, papers: Path) -> None:
    producer = make_producer(identity=Identity(papers / "preprocessor"))
    producer.add("part", make_batch(MIB, 7))
    wire = make_wire(producer, flips=bytes([7]) * 100)
    part = make_client("flight", tls=papers / "trainer").fetch(producer.endpoint, "part")
    assert part.batches[0].equals(make_batch(MIB, 7))
    assert wire.num_bytes > MIB
    assert wire.flips, "what it looked for did not come by"


def test_ucx_is_not_used_with_tls(make_producer: Any, make_client: Any, papers: Path) -> None:
    producer = make_producer(identity=Identity(papers / "preprocessor"))
    producer.servicer.offer.ucx_port = 1
    with pytest.raises(UserError, match="ucx: it does not encrypt, as TLS does"):
        make_client("ucx", tls=papers / "trainer").fetch(producer.endpoint, "part")


# -- refused ----------------------------------------------------------------------------------------------------------


def test_a_client_without_papers_is_told_to_name_them(make_producer: Any, make_client: Any, papers: Path) -> None:
    producer = make_producer(identity=Identity(papers / "preprocessor"))
    with pytest.raises(EndpointError, match=f"^{producer.endpoint} speaks TLS only: name the folder with this process's papers"):
        make_client("flight").fetch(producer.endpoint, "part")


def test_a_client_with_papers_is_told_that_the_preprocessor_speaks_no_tls(
    make_producer: Any, make_client: Any, papers: Path
) -> None:
    producer = make_producer()
    with pytest.raises(EndpointError, match=f"^{producer.endpoint} speaks no TLS: start it with --tls DIR"):
        make_client("flight", tls=papers / "trainer").fetch(producer.endpoint, "part")


def test_another_server_cannot_pose_as_a_preprocessor(make_producer: Any, make_client: Any, papers: Path) -> None:
    producer = make_producer(identity=Identity(papers / "reorder"))
    with pytest.raises(EndpointError, match=f"is that of {REORDER}, not of {PREPROCESSOR}: check the address"):
        make_client("flight", tls=papers / "trainer").fetch(producer.endpoint, "part")


@pytest.mark.parametrize("shown", ["no papers", "foreign papers"])
def test_flight_lets_in_nobody_but_who_shows_papers_of_the_authority(
    make_producer: Any, make_batch: Any, papers: Path, tmp_path: Path, shown: str
) -> None:
    producer = make_producer(identity=Identity(papers / "preprocessor"))
    producer.add("part", make_batch(MIB, 7))
    theirs = Identity(make_cluster_papers(tmp_path / "theirs") / "trainer").present()
    receiver = FlightReceiver(producer.flight_endpoint, papers=theirs if shown == "foreign papers" else None)
    with pytest.raises(Exception, match="does not answer"):
        receiver.fetch("part", timeout_s=60)
    assert producer.num_decoded <= 1
    assert not producer.servicer.num_parts


# -- health -----------------------------------------------------------------------------------------------------------


def test_health_is_told_over_tls(make_producer: Any, papers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for server in ("preprocessor", "reorder"):
        producer = make_producer(identity=Identity(papers / server))
        assert main(["health", producer.endpoint, "--tls", str(papers / "client")]) == 0
        producer.stop()
        assert main(["health", producer.endpoint, "--tls", str(papers / "client")]) == 1
        assert capsys.readouterr() == ("serving\nnot serving\n", "")


def test_health_that_tls_keeps_back_is_a_sentence_not_an_answer(
    make_producer: Any, papers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = make_cluster_papers(tmp_path / "theirs")
    secret, plain = make_producer(identity=Identity(papers / "preprocessor")), make_producer()
    for arguments, sentence in [
        (
            [secret.endpoint, "--tls", ""],
            f"{secret.endpoint} speaks TLS only: name the folder with this process's papers by --tls",
        ),
        ([secret.endpoint, "--tls", str(theirs / "client")], f"the certificate of {secret.endpoint} is of no authority in "),
        ([plain.endpoint, "--tls", str(papers / "client")], f"{plain.endpoint} speaks no TLS: start it with --tls DIR"),
        ([plain.endpoint, "--tls", str(tmp_path / "none")], f"{tmp_path / 'none' / 'ca.crt'} cannot be read"),
    ]:
        assert main(["health", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"headrace health: {sentence}")
        assert err.count("\n") == 1


# -- renewal ----------------------------------------------------------------------------------------------------------


def test_flight_takes_up_new_papers_while_a_part_is_on_its_way(
    make_producer: Any, make_client: Any, make_rows: Any, papers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new papers are of another authority, so that only the server with the new ones takes them."""
    monkeypatch.setattr(flight_renewal, "LOOK_S", 0.05)
    renewed = threading.Event()
    monkeypatch.setattr(flight_renewal.log, "info", lambda *_: renewed.set())
    producer = make_producer(200 * MIB, identity=Identity(papers / "preprocessor"))
    rows = make_rows([4 * MIB] * 20)
    producer.add("long", rows)
    producer.add("next", make_rows([MIB], 7))
    former = connect(producer.flight_endpoint, Identity(papers / "trainer").present())
    make_client("flight", tls=papers / "trainer").fetch(producer.endpoint, "next")
    reader = former.do_get(flight.Ticket(payload_pb2.FetchRequest(ticket="long").SerializeToString()))
    first = reader.read_chunk().data  # the rest of 80 MiB stays with the server until it is read
    (papers / "authority").rename(papers / "former")
    make_cluster_papers(papers)
    assert renewed.wait(60)
    part = make_client("flight", tls=papers / "trainer").fetch(producer.endpoint, "next")
    assert part.batches[0].equals(make_rows([MIB], 7))
    assert pa.Table.from_batches([first, *reader.read_all().to_batches()]).num_rows == rows.num_rows


def connect(endpoint: str, papers: Papers) -> Any:
    shown = {"tls_root_certs": papers.authorities, "cert_chain": papers.chain, "private_key": papers.key}
    return flight.connect(f"grpc+tls://{endpoint}", override_hostname=PREPROCESSOR, **shown)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "folder", "arguments", "sentence"),
    [
        (preprocessor, "missing", [], "ca.crt cannot be read"),
        (preprocessor, "reorder", [], f"is the certificate of {REORDER}, and clients of this service ask for {PREPROCESSOR}"),
        (preprocessor, "preprocessor", ["--ucx"], "--ucx does not encrypt, and --tls or HEADRACE_TLS asks for it"),
        (preprocessor, "preprocessor", ["--flight-port", "70000"], "--flight-port must be a port, 0 to 65535, got 70000"),
        (reorder, "missing", [], "ca.crt cannot be read"),
        (reorder, "client", [], f"is the certificate of client.headrace, and clients of this service ask for {REORDER}"),
    ],
)
def test_commands_check_their_options_before_they_wait_for_anybody(
    papers: Path, monkeypatch: pytest.MonkeyPatch, command: Any, folder: str, arguments: list[str], sentence: str
) -> None:
    monkeypatch.setenv(TLS, str(papers / folder))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(UserError, match=f"^[^\n]*{sentence}"):
        command.run(parser.parse_args(arguments))
