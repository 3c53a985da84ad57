"""The page's server over a real socket, in front of a real service in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509

from headrace.admission import release
from headrace.errors import EndpointError
from headrace.identity import AUTHORITIES, Identity
from headrace.reorder_service.leadership import Leadership
from headrace.reorder_service.page import page_server
from headrace.reorder_service.page.page_server import PageOptions, page_served
from headrace.reorder_service.page.static_files import static_answers
from headrace.reorder_service.service import ReorderService
from tests.papers import make_cluster_papers, serial_number
from tests.unit.reorder_service.job_world import Preprocessor, Start, consume, submit, until

ENDPOINT = "127.0.0.1:7070"


@contextlib.asynccontextmanager
async def page(service: ReorderService | None = None, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """The page of a service that leads; None: of one that stands by."""
    leadership = Leadership()
    leadership.leader = f"{ENDPOINT} 0123abcd" if service is not None else "10.0.0.2:7070 4567cdef"
    leadership.active_service, leadership.lease_ends_s = service, math.inf
    async with (
        page_served(PageOptions(listen="127.0.0.1:0", **options), leadership, ENDPOINT) as url,
        aiohttp.ClientSession(url) as session,
    ):
        yield session


async def get(session: aiohttp.ClientSession, path: str, status: int = 200, **options: Any) -> Any:
    async with session.get(path, **options) as reply:
        assert reply.status == status, await reply.text()
        assert reply.headers["Content-Type"] == "application/json"
        return await reply.json()


@pytest.fixture
async def service(start: Start) -> ReorderService:
    """With a job of 6 steps whose row 3 is bad, 3 of which are committed, and a submitted one that nobody trains."""
    service = await start()
    Preprocessor(service=service, bad_rows={3}).join()
    run = await submit(service, join=False, shuffle=False)
    await run.wait_ready()
    await consume(run, run.open_session(0, 1), stop=3)
    other = await submit(service, join=False, name="other")
    await other.wait_ready()
    return service


async def test_the_service_and_the_list_of_its_jobs(service: ReorderService) -> None:
    async with page(service) as session:
        about = await get(session, "/api/service")
        listed = await get(session, "/api/jobs")
    assert (about["version"], about["endpoint"], about["leading"], about["leader"]) == (release(), ENDPOINT, True, ENDPOINT)
    assert about["message"] == ""
    [one] = about["preprocessors"]
    assert (one["id"], one["host"], one["threads"], one["decoding"], one["store_bytes"]) == ("p", "p", 1, 0, 0)
    assert [(job["job"], job["state"], job["committed_steps"], job["num_steps"]) for job in listed["jobs"]] == [
        ("job", "running", 3, 6),
        ("other", "running", 0, 6),
    ]
    assert [job["ranks"] for job in listed["jobs"]] == [1, 0]
    assert listed["jobs"][1]["held_up"]
    assert listed["jobs"][1]["finding"].startswith("no trainer is connected: ")
    assert listed["left_out"] == 0


async def test_one_job_with_all_its_parts(service: ReorderService) -> None:
    run = service.jobs["job"]
    await until(lambda: len(run.cursor.planned) == 2)
    async with page(service) as session:
        job = await get(session, "/api/jobs/job")
        steps = await get(session, "/api/jobs/job/steps?last=2")
        timeline = await get(session, "/api/jobs/job/timeline")
        committed = await get(session, "/api/jobs/job/timeline?step=1")
        quarantine = await get(session, "/api/jobs/job/quarantine?first=0&count=5")
        later = await get(session, "/api/jobs/job/quarantine?first=1")
    assert (job["committed_steps"], job["num_steps"], job["planned_steps"], job["generation"]) == (3, 6, 2, 1)
    assert (job["batch_size"], job["strategy"], job["loss"]) == (4, "auto", 2.0)
    assert [(one["source"], one["asked"]) for one in job["mixture"]] == [("d", 1.0)]
    assert [(rank["rank"], rank["unit"], rank["step_s"]) for rank in job["ranks"]] == [(0, None, 1.0)]
    assert (steps["first_step"], steps["measured_s"], steps["forecast_s"]) == (1, [1.0, 1.0], [None, None])
    assert {len(column) for name, column in steps.items() if name != "first_step"} == {2}
    assert (timeline["step"], timeline["measured_s"]) == (4, None)
    assert (committed["step"], committed["measured_s"]) == (1, 1.0)
    assert {action["kind"] for row in timeline["rows"] for action in row["actions"]} == {"forward", "backward"}
    [rejection] = quarantine["rejections"]
    assert quarantine["total"] == 1
    assert (rejection["shard"], rejection["row"], rejection["reason"]) == ("d/a", 3, "corrupt_media")
    assert later == {"total": 1, "rejections": []}
    await consume(run, run.open_session(0, 1))
    async with page(service) as session:  # over, it stays to be looked at
        job = await get(session, "/api/jobs/job")
        listed = await get(session, "/api/jobs")
    assert (job["state"], job["finding"]) == ("done", "every step is committed")
    assert (job["held_up"], job["samples_per_s"]) == (False, None)
    assert [one["state"] for one in listed["jobs"]] == ["done", "running"]


REFUSED = [
    ("/api/jobs/nobody", 404, "no job 'nobody' here; there are: job, other"),
    ("/api/jobs/nobody/steps", 404, "no job 'nobody' here"),
    ("/api/jobs/job/timeline?step=77", 404, "no plan of step 77 of job 'job' is at hand"),
    ("/api/jobs/job/steps?last=0", 400, "?last= takes a whole number from 1 to 1000, got '0'"),
    ("/api/jobs/job/quarantine?count=-1", 400, "?count= takes a whole number from 1 to 1000, got '-1'"),
    ("/api/jobs/job/plans", 404, "there is no such path: /api has service, jobs, jobs/NAME"),
    ("/api/", 404, "there is no such path"),
    ("/api/watch", 400, "/api/watch takes one to 4 paths below /api/"),
    ("/static/../page_server.py", 404, "the page has no file"),
    ("/static/%2e%2e/page_server.py", 404, "the page has no file"),
    ("/metrics", 404, "the page has no file '/metrics': open /"),
]


async def test_what_there_is_not_is_told_in_a_sentence(service: ReorderService) -> None:
    async with page(service) as session:
        for path, status, sentence in REFUSED:
            assert sentence in (await get(session, path, status))["error"]


async def test_the_files_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html><title>here</title>")
    monkeypatch.setattr(page_server, "static_answers", lambda **options: static_answers(tmp_path, **options))
    async with page(token="a-token-of-the-cluster") as session:
        for path in ("/", "/static/index.html"):
            async with session.get(path) as reply:
                assert (reply.status, reply.content_type, await reply.text()) == (
                    200,
                    "text/html",
                    "<!doctype html><title>here</title>",
                )


async def test_who_watches_is_told_what_changes_until_the_job_is_done(service: ReorderService) -> None:
    run, told = service.jobs["job"], list[dict[str, Any]]()
    path = "/api/watch?ask=jobs/job&ask=jobs/job/steps%3Flast%3D2&ask=jobs/job/plans"
    async with page(service) as session, session.get(path) as reply:
        assert (reply.status, reply.content_type, reply.headers["Cache-Control"]) == (200, "application/x-ndjson", "no-store")
        async for line in reply.content:
            told += [json.loads(line)] if line.strip() else []
            if len(told) == 1:
                await consume(run, run.open_session(0, 1))
            if told[-1].get("jobs/job", {"body": {"state": ""}})["body"]["state"] == "done":
                break
    assert {name: part["status"] for name, part in told[0].items()} == {
        "jobs/job": 200,
        "jobs/job/steps?last=2": 200,
        "jobs/job/plans": 404,
    }
    assert told[0]["jobs/job"]["body"]["committed_steps"] == 3
    assert [one["jobs/job/steps?last=2"]["body"]["first_step"] for one in told if "jobs/job/steps?last=2" in one][-1] == 4
    assert all("jobs/job/plans" not in one for one in told[1:])


async def test_watching_ends_after_a_while_and_has_a_bound(service: ReorderService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "WATCH_S", 0.1)
    async with page(service) as session:
        body = b""
        while not body.strip():  # on a busy machine it may have ended before it had something to tell
            async with session.get("/api/watch?ask=service") as reply:
                body = await reply.read()
        assert json.loads(body.splitlines()[0])["service"]["status"] == 200
        async with session.head("/api/watch?ask=service") as head:
            assert (head.status, head.content_type) == (200, "application/x-ndjson")
        monkeypatch.setattr(page_server, "MOST_VIEWERS", 0)
        assert "this service tells 0 pages what changes" in (await get(session, "/api/watch?ask=service", 429))["error"]


async def test_a_service_that_stops_does_not_wait_for_those_who_watch(service: ReorderService) -> None:
    async with contextlib.AsyncExitStack() as watching:
        async with page(service) as session:
            reply = await watching.enter_async_context(session.get("/api/watch?ask=service"))
            await reply.content.readline()
        await until(lambda: not any(task.get_name() == "page view" for task in asyncio.all_tasks()))


async def test_a_standby_says_who_leads() -> None:
    async with page() as session:
        about = await get(session, "/api/service")
        assert (about["leading"], about["leader"], about["preprocessors"]) == (False, "10.0.0.2:7070", [])
        for path in ("/api/jobs", "/api/jobs/job", "/api/jobs/job/steps"):
            assert (await get(session, path, 409))["error"] == "this reorder service stands by; 10.0.0.2:7070 leads"


async def test_a_service_with_a_token_asks_for_it_and_is_only_read() -> None:
    token = "a-token-of-the-cluster"
    async with page(token=token) as session:
        for path in ("/api/service", "/api/watch?ask=service", f"/api/watch?ask=service&token={token}"):
            assert "send `Authorization: Bearer TOKEN`" in (await get(session, path, 401))["error"]
        assert not (await get(session, "/api/service", headers={"Authorization": f"Bearer {token}"}))["leading"]
        async with session.post("/api/jobs", data=b"{}") as reply:
            assert (reply.status, reply.headers["Allow"]) == (405, "GET, HEAD")
            assert "not by POST" in (await reply.json())["error"]


async def test_https_with_papers_that_are_renewed_meanwhile(tmp_path: Path) -> None:
    papers = make_cluster_papers(tmp_path / "papers")
    client = ssl.create_default_context(cafile=str(papers / "client" / AUTHORITIES))

    async def shown(port: int) -> int:
        """The number of the certificate that a new connection is shown."""
        certificate = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=60)
        return x509.load_pem_x509_certificate(certificate.encode()).serial_number

    options = PageOptions(listen="127.0.0.1:0", identity=Identity(papers / "reorder"))
    async with page_served(options, Leadership(), ENDPOINT) as url, aiohttp.ClientSession() as session:
        port = int(url.rstrip("/").rpartition(":")[2])
        before = serial_number(papers / "reorder")
        assert await shown(port) == before
        make_cluster_papers(papers, renew=True)
        assert await shown(port) == serial_number(papers / "reorder") != before
        about = await get(session, f"{url}api/service", ssl=client, server_hostname="reorder.headrace")
        assert not about["leading"]


async def test_a_taken_port_is_named_with_the_remedy() -> None:
    async with page() as session:
        taken = f"127.0.0.1:{session._base_url.port}"  # type: ignore[union-attr]
        with pytest.raises(EndpointError, match=f"^cannot serve the page on {taken}: .*; give --page another HOST:PORT"):
            async with page_served(PageOptions(listen=taken), Leadership(), ENDPOINT):
                pass


async def test_fifty_who_look_cost_what_one_does_and_what_has_not_changed_is_not_sent_again(
    service: ReorderService, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    count = service.store.num_quarantined

    async def counted(job: str) -> int:
        nonlocal looks
        looks += 1
        return await count(job)

    monkeypatch.setattr(service.store, "num_quarantined", counted)
    async with page(service) as session:
        bodies = await asyncio.gather(*(get(session, "/api/jobs/job") for _ in range(50)))
        async with session.get("/api/jobs/job/steps") as reply:
            etag, body = reply.headers["ETag"], await reply.read()
        async with session.get("/api/jobs/job/steps", headers={"If-None-Match": etag}) as again:
            assert (again.status, await again.read(), again.headers["ETag"]) == (304, b"", etag)
        async with session.head("/api/jobs/job/steps") as head:
            assert (head.status, head.headers["Content-Length"], await head.read()) == (200, str(len(body)), b"")
        assert {name: head.headers[name] for name in ("Server", "X-Content-Type-Options")} == {
            "Server": "headrace",
            "X-Content-Type-Options": "nosniff",
        }
    assert {json.dumps(body) for body in bodies} == {json.dumps(bodies[0])}
    assert looks < 10  # some seconds may pass on a busy machine


def address_of(session: aiohttp.ClientSession) -> tuple[str, int]:
    url = session._base_url
    assert url is not None
    assert url.host is not None
    assert url.port is not None
    return url.host, url.port


def distrust(address: tuple[str, int]) -> None:
    """Connect as a browser that does not know the authority, and says so."""
    with (
        socket.create_connection(address, timeout=60) as connection,
        pytest.raises(ssl.SSLCertVerificationError),
        ssl.create_default_context().wrap_socket(connection, server_hostname="reorder.headrace"),
    ):
        pass


async def test_who_is_turned_away_by_https_is_told_why_and_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    papers = make_cluster_papers(tmp_path)
    async with page(identity=Identity(papers / "reorder")) as session:
        host, port = address_of(session)
        async with aiohttp.ClientSession() as plain, plain.get(f"http://{host}:{port}/api/service") as reply:
            said = await reply.text()
            assert reply.status == 400
            assert said.startswith(f"this port speaks HTTPS only: ask https://{host}:{port}/, with the ca.crt of the ")
        await asyncio.to_thread(distrust, (host, port))
        client = ssl.create_default_context(cafile=str(papers / "client" / AUTHORITIES))
        await get(session, "/api/service", ssl=client, server_hostname="reorder.headrace")
        async with asyncio.timeout(60):
            while "does not accept the certificate" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the client knows it first
    lines = [text for record in caplog.records if (text := record.getMessage()).startswith("refused a connection")]
    assert [re.sub(r"127.0.0.1:\d+", "HOST", line) for line in lines] == [
        'refused a connection peer=ipv4:HOST reason="plain text"',
        'refused a connection peer=ipv4:HOST reason="does not accept the certificate"',
    ]


async def test_https_hangs_up_on_who_only_waits(tmp_path: Path) -> None:
    async with page(identity=Identity(make_cluster_papers(tmp_path) / "reorder")) as session:
        reading, writing = await asyncio.open_connection(*address_of(session))
    assert await reading.read() == b""
    writing.close()
