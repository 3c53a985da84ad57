"""Whoever is not let in, of a service with TLS and tokens of roles: each is refused with a reason, is a line of the service's log
with peer and reason, and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest

from headrace.admission import LARGEST_REQUEST_BYTES, MIB
from headrace.cli.run.authority import open_authority
from headrace.cli.run.connection_log import LOG_CONNECTIONS
from headrace.identity import CHAIN, CLIENT, KEY, REORDER
from headrace.jobs_client import JobsClient, state_name
from headrace.processes import Process, ProcessGroup
from headrace.token_folder import make_tokens
from headrace.v1 import jobs_pb2
from tests.integration.conftest import make_spec
from tests.papers import expire, make_cluster_papers

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0
KEPT = ("kept", "kept-too")
"""Jobs that have not ended, as many as the service takes."""
UNAVAILABLE, UNAUTHENTICATED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED
DENIED, INVALID, EXHAUSTED = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
ROLES = ("submit", "train", "preprocess", "watch")
CANCEL = ("Cancel", jobs_pb2.CancelRequest(job="kept").SerializeToString())


def submission(name: str, padding: int = 0) -> tuple[str, bytes]:
    """A call that submits a job; `padding`: bytes that its spec is longer by."""
    return "Submit", jobs_pb2.SubmitRequest(spec_json=make_spec(name).to_peer_json() + " " * padding).SerializeToString()


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    """A reorder service with TLS and tokens of roles, and the papers of all that may call and of some that may not."""

    folder: Path
    service: Process
    endpoint: str

    def token(self, role: str) -> str:
        return (self.folder / "tokens" / role).read_text(encoding="utf-8").strip()

    def client(self, role: str) -> JobsClient:
        return JobsClient(self.endpoint, token=self.token(role), tls=self.folder / "papers" / "client")

    def jobs(self) -> list[tuple[str, str, str, int]]:
        """All that could change of jobs for which there is no preprocessor."""
        with self.client("watch") as client:
            return [(one.job, state_name(one), one.spec_json, one.committed_steps) for one in client.jobs()]

    def lines(self, reason: str) -> list[str]:
        """What the service has written of those that it refused for this reason."""
        said = self.service.log.read_text(encoding="utf-8").splitlines()
        return [line for line in said if " WARNING refused a " in line and f"reason={reason} " in f"{line} "]

    def call(
        self, method: str, message: bytes, *, papers: str = "papers/client", says: str = "submit"
    ) -> tuple[grpc.StatusCode, str]:
        """(status, sentence) of a call to Jobs. `papers`: none: in plain text. `says`: a token, or the role that has it."""
        options = (("grpc.ssl_target_name_override", REORDER),)
        if papers:
            shown = self.folder / papers
            roots = (self.folder / "papers" / "client" / "ca.crt").read_bytes()
            credentials = grpc.ssl_channel_credentials(roots, (shown / KEY).read_bytes(), (shown / CHAIN).read_bytes())
            channel = grpc.secure_channel(self.endpoint, credentials, options=options)
        else:
            channel = grpc.insecure_channel(self.endpoint)
        token = self.token(says) if says in ROLES else says
        metadata = [("authorization", f"Bearer {token}")] if token else []
        with channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/headrace.v1.Jobs/{method}")(message, metadata=metadata, timeout=PATIENCE_S)
        return refused.value.code(), refused.value.details() or ""


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("doors")
    papers = make_cluster_papers(folder / "papers")
    authority, _ = open_authority(papers / "authority", datetime.now(UTC))
    (folder / "expired").mkdir()
    expire(folder / "expired", authority, CLIENT)
    make_cluster_papers(folder / "foreign")
    make_tokens(folder / "tokens")
    arguments = ["reorder", "--listen", "127.0.0.1:0", "--store", f"embedded:{folder / 'store'}", "--max-jobs", str(len(KEPT))]
    arguments += ["--tls", str(papers / "reorder"), "--tokens", str(folder / "tokens")]
    with ProcessGroup() as group:
        service = group.add(Process("reorder", arguments, folder / "reorder.log", prefix=["env", f"{LOG_CONNECTIONS}=1"]))
        made = Doors(folder=folder, service=service, endpoint=service.endpoint())
        with made.client("submit") as client:
            for name in KEPT:
                client.submit(make_spec(name))
        yield made


REFUSALS = {
    "plain text": ('"plain text"', UNAVAILABLE, "", CANCEL, {"papers": ""}),
    "an expired certificate": ('"expired certificate"', UNAVAILABLE, "", CANCEL, {"papers": "expired"}),
    "a certificate of another authority": ('"foreign certificate"', UNAVAILABLE, "", CANCEL, {"papers": "foreign/client"}),
    "no token": ('"no token"', UNAUTHENTICATED, "asks for a role's token, and the call brought none", CANCEL, {"says": ""}),
    "a token that nobody has": ('"unknown token"', UNAUTHENTICATED, "brought another one", CANCEL, {"says": "x" * 32}),
    "a token of another role": (
        "role",
        DENIED,
        "takes the role submit, and the call's token has train",
        CANCEL,
        {"says": "train"},
    ),
    "a message that is too large": ('"too large"', INVALID, "8388608 at most", submission("big", 9 * MIB), {}),
    "one that gRPC does not carry": (
        '"too large or cut off"',
        EXHAUSTED,
        "larger than max",
        submission("huge", LARGEST_REQUEST_BYTES),
        {},
    ),
    "a job too many": ('"too many jobs"', EXHAUSTED, "2 jobs have not ended", submission("third"), {}),
}
"""Who comes -> the reason in the log, status and words of the answer, the call, and as whom."""


@pytest.mark.parametrize(("reason", "status", "words", "call", "caller"), REFUSALS.values(), ids=REFUSALS.keys())
def test_who_is_refused_is_told_why_is_a_line_with_its_peer_and_changes_nothing(
    doors: Doors, reason: str, status: grpc.StatusCode, words: str, call: tuple[str, bytes], caller: dict[str, str]
) -> None:
    before = doors.jobs()
    assert [name for name, *_ in before] == list(KEPT)

    code, sentence = doors.call(*call, **caller)

    assert code is status, sentence
    assert words in sentence
    deadline = time.monotonic() + PATIENCE_S
    while not (lines := doors.lines(reason)):
        assert time.monotonic() < deadline, doors.service.log.read_text()
        time.sleep(0.05)  # polls a real process, of which the caller may hear first
    assert all(" peer=ipv4:127.0.0.1:" in line for line in lines)
    assert doors.jobs() == before
