"""A cluster with a secret: who says it is served, whoever does not is told what to do, and the secret is in no command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster_token import TOKEN, TOKEN_FILE
from headrace.errors import RoleError, UnauthenticatedError
from headrace.ledger import ledger_sha256
from headrace.processes import Process
from tests.wire import free_ports

pytestmark = pytest.mark.integration

SECOND = "the-second-token-of-trainers"


@pytest.mark.parametrize("service", [["reorder"], ["preprocessor", "--reorder", "127.0.0.1:1"]], ids=lambda value: value[0])
def test_no_service_is_open_to_the_network_unasked(headrace, service: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    result = headrace(*service, "--listen", "0.0.0.0:0")
    assert (result.returncode, len(result.stderr.strip().splitlines())) == (2, 1), result.stderr
    remedies = (
        "HEADRACE_CLUSTER_TOKEN",
        "--cluster-token-file",
        "127.0.0.1",
        "--allow-anyone",
        "HEADRACE_TLS",
        "--allow-plaintext",
    )
    for remedy in remedies:
        assert remedy in result.stderr
    if service[0] == "preprocessor":
        monkeypatch.setenv(TOKEN, "too-short")
        assert "at least 16 ASCII characters" in headrace(*service, "--listen", "0.0.0.0:0").stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [["preprocessor", "--reorder", "127.0.0.1:1", "--listen", "0.0.0.0:0"], ["train", "--endpoint", "127.0.0.1:1", "--job", "j"]],
    ids=lambda arguments: arguments[0],
)
def test_who_starts_before_the_token_is_made_waits_for_its_file(arguments: list[str], tmp_path: Path) -> None:
    file = tmp_path / "token"
    environment = {name: value for name, value in os.environ.items() if name != TOKEN} | {TOKEN_FILE: str(file)}
    command = [sys.executable, "-m", "headrace.cli", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            assert f"waiting up to 30 s for the cluster's token in {file}" in process.stderr.readline()
            (tmp_path / "made").write_text("too-short")  # by which it shows that it has read it
            (tmp_path / "made").rename(file)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, len(said.splitlines())) == (2, 1), said
    assert f"{file}: the cluster's token must be at least 16 ASCII characters" in said


def test_a_job_in_a_cluster_with_a_secret(
    headrace, cluster: Any, spec: Any, undisturbed: Callable[[int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed(3)  # by services without one, on the loopback interface
    monkeypatch.delenv(TOKEN, raising=False)
    file = tmp_path / "secrets" / "token"
    cluster.endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    arguments = ["reorder", "--listen", cluster.endpoint, "--store", f"embedded:{tmp_path / 'store'}"]
    cluster.group.add(Process("reorder", [*arguments, "--cluster-token-file", str(file)], tmp_path / "reorder.log")).endpoint()
    token = file.read_text().strip()

    stranger = headrace("job", "list", "--endpoint", cluster.endpoint)
    assert (stranger.returncode, len(stranger.stderr.strip().splitlines())) == (2, 1), stranger.stderr
    assert "asks for the cluster's token, and the call brought none" in stranger.stderr
    assert headrace("health", cluster.endpoint).stdout == "serving\n"
    cluster.add_preprocessors(1)  # a stranger too: it waits, and says so
    log = cluster.preprocessors[0].log
    deadline = time.monotonic() + 60
    while "the call brought none" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)  # polls a real process
    assert cluster.preprocessors[0].exit_code() is None

    cluster.add_preprocessors(1, "--cluster-token-file", str(file))
    listed = headrace("job", "list", "--endpoint", cluster.endpoint, "--cluster-token-file", str(file), "--format", "json")
    assert json.loads(listed.stdout) == {"jobs": []}, listed.stderr
    monkeypatch.setenv(TOKEN_FILE, str(file))
    job = cluster.submit(spec("guarded", steps=3))
    with pytest.raises(UnauthenticatedError, match="brought another one"):
        cluster.consume(job, token="not-the-token-of-them")
    monkeypatch.delenv(TOKEN_FILE)
    assert cluster.consume(job, token=token) == [0, 1, 2]
    monkeypatch.setenv(TOKEN, token)
    assert ledger_sha256(cluster.ledger(job)) == expected
    assert [member.preprocessor for member in cluster.client().show(job).preprocessors] != []
    for process in cluster.group.processes:
        assert token not in Path(f"/proc/{process.pid}/cmdline").read_text()


def test_a_job_in_a_cluster_with_roles(
    headrace, cluster: Any, spec: Any, undisturbed: Callable[[int], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has the token of its role, which changes while the service runs."""
    expected = undisturbed(3)
    monkeypatch.delenv(TOKEN, raising=False)
    folder = tmp_path / "tokens"
    made = headrace("tokens", str(folder))
    tokens = {path.name: path.read_text().strip() for path in folder.iterdir()}
    assert (made.returncode, sorted(tokens)) == (0, ["preprocess", "submit", "train", "watch"]), made.stderr
    assert not any(token in made.stdout for token in tokens.values())
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "train").symlink_to(folder / "train")
    cluster.endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    log = tmp_path / "reorder.log"
    arguments = ["reorder", "--listen", cluster.endpoint, "--store", f"embedded:{tmp_path / 'store'}", "--tokens", str(folder)]
    cluster.group.add(Process("reorder", arguments, log)).endpoint()
    cluster.add_preprocessors(1, "--cluster-token-file", str(folder / "preprocess"), "--tokens", str(tmp_path / "trainers"))

    def role(name: str) -> None:
        monkeypatch.setenv(TOKEN_FILE, str(folder / name))

    role("watch")
    with pytest.raises(RoleError, match=r"Jobs/Submit takes the role submit, and the call's token has watch"):
        cluster.submit(spec("guarded", steps=3))
    role("submit")
    job = cluster.submit(spec("guarded", steps=3))
    with pytest.raises(RoleError, match=r"Sessions/Open takes the role train, and the call's token has submit"):
        cluster.consume(job)
    role("train")
    changed = folder / ".train"
    changed.write_text(f"{SECOND}\n{tokens['train']}\n")
    changed.rename(folder / "train")
    deadline = time.monotonic() + 60
    while "tokens read anew" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        headrace("job", "list", "--endpoint", cluster.endpoint, "--cluster-token-file", str(folder / "watch"))
    assert cluster.consume(job, token=tokens["train"]) == [0, 1, 2]
    with pytest.raises(UnauthenticatedError, match="brought another one"):
        cluster.consume(job, token="not-the-token-of-them")
    role("watch")
    assert ledger_sha256(cluster.ledger(job)) == expected
    refused = [line for line in log.read_text().splitlines() if "refused a call" in line]
    assert any("method=/headrace.v1.Jobs/Submit" in line and "has=watch takes=submit" in line for line in refused), refused
    assert not any(token in log.read_text() for token in (SECOND, *tokens.values()))
