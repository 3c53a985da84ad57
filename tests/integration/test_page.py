"""The page of a cluster that asks for tokens and speaks TLS, beside a job that is trained."""

from __future__ import annotations

import base64
import io
import json
import re
import ssl
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster_token import TOKEN, TOKEN_FILE
from headrace.identity import AUTHORITIES, TLS
from headrace.processes import ProcessGroup
from headrace.thumbnail_check import is_thumbnail
from tests.integration.trainers import start, wait
from tests.papers import make_cluster_papers

pytestmark = pytest.mark.integration

HOSTILE = Path(__file__).parents[1] / "data" / "hostile"
STEPS = 4


def test_no_page_is_open_to_the_network_unasked(headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TOKEN, TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)
    result = headrace("reorder", "--listen", "127.0.0.1:0", "--page", "0.0.0.0:0")
    assert (result.returncode, len(result.stderr.strip().splitlines())) == (2, 1), result.stderr
    assert "--page 0.0.0.0:0 lets in whoever reaches it" in result.stderr
    assert "--allow-anyone" in result.stderr
    monkeypatch.setenv(TOKEN, "a-token-without-papers")
    result = headrace("reorder", "--listen", "127.0.0.1:0", "--page", "0.0.0.0:0")
    assert (result.returncode, len(result.stderr.strip().splitlines())) == (2, 1), result.stderr
    assert "--page 0.0.0.0:0 sends" in result.stderr
    assert "--allow-plaintext" in result.stderr


def test_a_job_is_seen_over_https_by_who_may_watch(
    headrace, cluster: Any, spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (TOKEN, TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)
    papers = make_cluster_papers(tmp_path / "papers")
    assert headrace("tokens", str(tmp_path / "tokens")).returncode == 0
    tokens = {path.name: path.read_text().strip() for path in (tmp_path / "tokens").iterdir()}
    monkeypatch.setenv(TLS, str(papers / "client"))
    cluster.start_reorder("--tls", str(papers / "reorder"), "--tokens", str(tmp_path / "tokens"), "--page", "127.0.0.1:0")
    own = ("--tls", str(papers / "preprocessor"), "--cluster-token-file", str(tmp_path / "tokens" / "preprocess"))
    cluster.add_preprocessors(1, *own, "--tokens", str(tmp_path / "tokens"))
    get = _getter(tmp_path / "reorder.log", papers / "client" / AUTHORITIES)
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "tokens" / "submit"))
    job = cluster.submit(spec("seen", steps=STEPS))
    seen: list[Any] = []
    steps = cluster.consume(
        job, lambda _step: seen.append(get(f"/api/jobs/{job}", tokens["watch"])), tls=papers / "trainer", token=tokens["train"]
    )
    assert steps == list(range(STEPS))
    assert [(status, body["state"], len(body["ranks"])) for status, body in seen] == [(200, "running", 1)] * STEPS
    cluster.wait_for_state(job, "done")
    about = get("/api/service", tokens["watch"])[1]
    assert (about["leading"], about["endpoint"], len(about["preprocessors"])) == (True, cluster.endpoint, 1)
    deadline = time.monotonic() + 60
    while get("/api/jobs", tokens["watch"])[1]["jobs"][0]["state"] != "done":  # an answer is kept for a second
        assert time.monotonic() < deadline
        time.sleep(0.05)  # polls a real service
    told = get(f"/api/jobs/{job}/steps", tokens["watch"])[1]
    assert (told["first_step"], len(told["samples"]), min(told["samples"]) > 0) == (0, STEPS, True)
    assert min(told["balance_after"]) >= 1.0 - 1e-6
    timeline = get(f"/api/jobs/{job}/timeline", tokens["watch"])[1]
    assert timeline["rows"][0]["actions"][0]["kind"] == "forward"
    assert [row["name"] for row in timeline["measured_rows"]] == ["replica 0 all units", "replica 1 all units"]
    assert {action["kind"] for action in timeline["measured_rows"][0]["actions"]} == {"whole"}
    assert get(f"/api/jobs/{job}/quarantine", tokens["watch"])[1]["total"] >= 0
    assert get("/api/jobs", "")[0] == 401
    assert get("/api/jobs", tokens["preprocess"])[0] == 403
    refused = [line for line in (tmp_path / "reorder.log").read_text().splitlines() if "refused a call" in line]
    assert any("GET /api/jobs" in line and "peer=ipv4:127.0.0.1:" in line and "no token" in line for line in refused), refused


def test_a_pipeline_is_seen_as_it_ran(cluster: Any, spec: Any, tmp_path: Path) -> None:
    cluster.start_reorder("--page", "127.0.0.1:0")
    cluster.add_preprocessors(1)
    topology = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}
    job = cluster.submit(spec("as-it-ran", steps=2, global_batch=4, topology=topology))
    with ProcessGroup() as group:
        processes = start(group, cluster, job, tmp_path, {"encoder": {}, "llm": {}}, 2, 2)
        assert wait(processes) == [0] * 2, processes[0].last_words()
    url = re.search(r"page url=(\S+)/", (tmp_path / "reorder.log").read_text())
    assert url is not None
    with urllib.request.urlopen(f"{url[1]}/api/jobs/{job}/timeline", timeout=30) as reply:
        told = json.load(reply)
    assert (told["step"], told["aligned_by"]) == (1, "clock")
    planned, ran = ({row["name"]: row["actions"] for row in told[rows]} for rows in ("rows", "measured_rows"))
    assert list(ran) == list(planned) == ["encoder", "llm"]
    for name, actions in ran.items():
        assert [(action["kind"], action["microbatch"]) for action in actions] == [
            (action["kind"], action["microbatch"]) for action in planned[name]
        ]
        times = [action[end] for action in actions for end in ("begin_s", "end_s")]
        assert times == sorted(times), "one after the other"
    assert 0 < max(actions[-1]["end_s"] for actions in ran.values()) <= told["measured_s"]
    ends = {
        name: {(action["kind"], action["microbatch"]): action["end_s"] for action in actions} for name, actions in ran.items()
    }
    assert ends["llm"]["backward", 0] < ends["encoder"]["backward", 0], "clocks of two processes agree"


@pytest.mark.parametrize(
    ("name", "topology", "execution", "units", "rows"),
    [
        (
            "fsdp-as-it-ran",
            {"stages": {"vision": 1, "audio": 1, "llm": 1}},
            {"trainer": "fsdp"},
            None,
            {
                f"rank {rank}": [f"{unit} forward" for unit in ("vision", "audio", "llm")]
                + [f"{unit} backward" for unit in ("llm", "audio", "vision")]
                for rank in (0, 1)
            },
        ),
        (
            "reduction-as-it-ran",
            {"stages": {"encoder": 1, "llm": 1}},
            {},
            {"encoder": {"dp": 2, "on": "llm"}, "llm": {"dp": 2}},
            {
                f"replica {replica} {unit}": [f"{unit} forward", f"{unit} backward", f"{unit} reduction"]
                for replica in (0, 1)
                for unit in ("encoder", "llm")
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_with_all_units_and_sums_of_gradients_are_seen_as_they_ran(
    cluster: Any, spec: Any, tmp_path: Path, name: str, topology: Any, execution: Any, units: Any, rows: dict[str, list[str]]
) -> None:
    cluster.start_reorder("--page", "127.0.0.1:0")
    cluster.add_preprocessors(1)
    topology = {"replicas": 2, "microbatches": 1, **topology}
    job = cluster.submit(spec(name, steps=2, global_batch=8, topology=topology, execution=execution))
    with ProcessGroup() as group:
        processes = start(group, cluster, job, tmp_path, units, 2, 2)
        assert wait(processes) == [0] * 2, processes[0].last_words()
    url = re.search(r"page url=(\S+)/", (tmp_path / "reorder.log").read_text())
    assert url is not None
    with urllib.request.urlopen(f"{url[1]}/api/jobs/{job}/timeline", timeout=30) as reply:
        told = json.load(reply)
    ran = {row["name"]: row["actions"] for row in told["measured_rows"]}
    assert list(ran) == list(rows)
    for row, actions in ran.items():
        seen = [f"{action['unit']} {action['kind']}" for action in actions]
        assert seen == [phase for phase in rows[row] if phase in seen], "a rank may have no sample of an encoder"
        assert set(rows[row]) - set(seen) <= {"vision forward", "vision backward", "audio forward", "audio backward"}
        times = [action[end] for action in actions for end in ("begin_s", "end_s")]
        assert times == sorted(times), "one after the other"
    assert told["aligned_by"] == "clock"


def test_what_can_be_seen_of_refused_samples_is_shown(cluster: Any, spec: Any, tmp_path: Path) -> None:
    """Every hostile image and recording through real processes: found by headers, when decoded, and by a rank at its commit."""
    data = tmp_path / "data"
    data.mkdir()
    with tarfile.open(data / "hostile.tar", "w") as archive:
        for path in sorted(path for folder in ("images", "audio") for path in (HOSTILE / folder).iterdir() if path.is_file()):
            kind = "jpg" if path.parent.name == "images" else "wav"
            _add(archive, f"{path.stem}-{path.suffix[1:]}.{kind}", path.read_bytes())
            _add(archive, f"{path.stem}-{path.suffix[1:]}.txt", b"what is said of it")
    cluster.start_reorder("--page", "127.0.0.1:0")
    cluster.add_preprocessors(1)
    job = cluster.submit(spec("hostile", sources=[{"path": str(data), "name": "h"}], global_batch=16))
    cluster.consume(job)
    cluster.wait_for_state(job, "done")
    url = re.search(r"page url=(\S+)/", (tmp_path / "reorder.log").read_text())
    assert url is not None
    with urllib.request.urlopen(f"{url[1]}/api/jobs/{job}/quarantine?count=1000", timeout=30) as reply:
        told = json.load(reply)
    found = {one["sample"].removeprefix("h/hostile.tar/"): one for one in told["rejections"]}
    assert told["total"] == len(found) > 30
    for name, reason in {
        "truncated-jpg": "corrupt_media",
        "half_with_eoi-jpg": "corrupt_media",
        "half_rows-png": "corrupt_media",
    }.items():
        assert (found[name]["reason"], found[name]["modality"]) == (reason, "image")
        head, _, body = found[name]["thumbnail"].partition(",")
        assert head == "data:image/jpeg;base64"
        assert is_thumbnail(base64.b64decode(body)), name
    for name in ("bomb_real_60000x60000_1bit-png", "bomb_header_65500x65500-jpg", "text_named-jpg"):
        assert (found[name]["modality"], found[name]["thumbnail"]) == ("image", None)
    assert {(one["modality"], one["thumbnail"]) for one in found.values() if one["modality"] != "image"} >= {("audio", None)}


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def _getter(log: Path, authorities: Path) -> Callable[[str, str], tuple[int, Any]]:
    """(path, token) -> status and body, of the page whose address is in the log."""
    found = re.search(r"page url=(https://\S+)/", log.read_text())
    assert found is not None, log.read_text()
    trusted = ssl.create_default_context(cafile=str(authorities))
    trusted.check_hostname = False  # the certificate is that of reorder.headrace

    def get(path: str, token: str) -> tuple[int, Any]:
        request = urllib.request.Request(found[1] + path, headers={"Authorization": f"Bearer {token}"} if token else {})
        try:
            with urllib.request.urlopen(request, timeout=30, context=trusted) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as err:
            with err:
                return err.code, json.load(err)

    return get
