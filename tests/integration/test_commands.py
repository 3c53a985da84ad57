"""The `headrace` command as a user runs it: exit codes, sentences, one JSON object on standard output, nobody left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from headrace import processes
from headrace.cli.main import main
from headrace.identity import TLS

pytestmark = pytest.mark.integration

HOSTILE = Path(__file__).parent.parent / "data" / "hostile"
DEMO_PROCESSES = 7  # reorder service and its store, two preprocessors, three trainers
QUICK = ["--steps", "3", "--global-batch", "8"]


def descendants(pid: int) -> set[int]:
    """Processes that `pid` started, and those that they started, as long as they live."""
    found: set[int] = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in map(int, children.read_text().split()):
                found |= {child} | descendants(child)
    return found


def left_of(processes: set[int]) -> list[int]:
    """Those that do not end. The store ends a moment after its service, where that had to be killed."""
    deadline = time.monotonic() + 10.0
    while (left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)  # polls real processes
    return left


@contextlib.contextmanager
def started_demo(out: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A demo in the background, once it has committed a step. It does not outlive the block."""
    command = [sys.executable, "-m", "headrace.cli", "demo", "--out", str(out), "--format", "json", *arguments]
    log = out / "trainer-0.log"
    deadline = time.monotonic() + 100.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        try:
            while not (log.exists() and " step " in log.read_text()):
                assert demo.poll() is None, demo.communicate()
                assert time.monotonic() < deadline, "no step within 100 s"
                time.sleep(0.05)  # polls a real process
            yield demo
        finally:
            demo.kill()


@pytest.fixture(scope="module")
def demo_summary(tmp_path_factory) -> dict:
    """Of a demo in this process, whose services and trainers are forks. In the slow tests a user's processes start all of it."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setenv(TLS, "")  # as the command does, so that it is undone
        assert main(["demo", "--out", str(tmp_path_factory.mktemp("demo")), "--format", "json", *QUICK]) == 0
    return json.loads(said.getvalue())


@pytest.mark.timeout(300)  # seven processes: beside others that take both cores they have needed more than two minutes
def test_the_demo_prints_one_json_object_and_draws_a_picture(demo_summary: dict) -> None:
    assert demo_summary["steps"] == 3
    assert demo_summary["samples"] == 24
    assert demo_summary["quarantined"] == []
    assert demo_summary["samples_per_s"] > 0
    assert 0 <= demo_summary["data_wait_fraction"] < 1
    assert demo_summary["last_loss"] < demo_summary["first_loss"]
    assert len(demo_summary["ledger_sha256"]) == 64
    assert Path(demo_summary["picture"]).read_bytes().startswith(b"\x89PNG")
    assert "page url=http://127.0.0.1:" in (Path(demo_summary["picture"]).parent / "reorder.log").read_text()


@pytest.mark.slow
def test_the_demo_s_ledger_survives_a_killed_preprocessor_and_another_strategy(demo_summary: dict, tmp_path: Path) -> None:
    with started_demo(tmp_path, *QUICK, "--strategy", "random") as demo:
        [victim, *_] = [
            pid for pid in descendants(demo.pid) if b"preprocessor" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ]
        os.kill(victim, signal.SIGKILL)
        out, err = demo.communicate(timeout=100)
    assert demo.returncode == 0, err
    assert json.loads(out)["ledger_sha256"] == demo_summary["ledger_sha256"]


@pytest.mark.slow
def test_a_killed_trainer_is_named_with_its_log(tmp_path: Path) -> None:
    with started_demo(tmp_path) as demo:
        family = sorted(descendants(demo.pid))
        victim = next(pid for pid in family if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        os.kill(victim, signal.SIGKILL)
        _, err = demo.communicate(timeout=100)
    assert demo.returncode == 1
    assert "trainer 1 was ended by SIGKILL: " in err
    assert f"(log: {tmp_path / 'trainer-1.log'})" in err


@pytest.mark.slow
def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    with started_demo(tmp_path) as demo:
        family = descendants(demo.pid)
        assert len(family) == DEMO_PROCESSES
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert not left_of(family)


@pytest.mark.slow
def test_a_killed_demo_leaves_nobody_behind(tmp_path: Path) -> None:
    with started_demo(tmp_path) as demo:
        family = descendants(demo.pid)
    assert len(family) == DEMO_PROCESSES
    assert not left_of(family)


@pytest.mark.slow
def test_the_demo_names_what_it_refuses(headrace, tmp_path: Path) -> None:
    data = tmp_path / "mine"
    data.mkdir()
    for name in ("good", "one_bad_of_three"):
        (data / f"{name}.tar").write_bytes((HOSTILE / "tars" / f"{name}.tar").read_bytes())
    result = headrace("demo", str(data), "--out", str(tmp_path / "out"), "--format", "json", "--preprocessors", "1")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["samples"] == 5
    assert [(item["sample"], item["reason"]) for item in summary["quarantined"]] == [
        ("mine/one_bad_of_three.tar/r", "corrupt_media")
    ]


@pytest.mark.slow
def test_a_demo_in_which_nothing_is_good_fails_and_spares_what_is_not_its_own(headrace, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    out.mkdir()
    (data / "a.jsonl").write_text('{"id": 1}\n')
    (out / "mine.log").write_text("precious")
    result = headrace("demo", str(data), "--out", str(out), "--preprocessors", "1")
    assert result.returncode == 2
    assert "every sample of job 'demo' was refused" in result.stderr
    assert (out / "mine.log").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["demo", "/no/such/folder"], "/no/such/folder"),
        (["demo", "--strategy", "magic"], "no strategy 'magic'"),
        (["demo", "--preprocessors", "0"], "--preprocessors must be at least 1"),
        (["train", "--job", "x", "--threads", "0"], "--threads must be at least 1"),
        (["train", "--job", "x", "--checkpoint-every", "0"], "--checkpoint-every must be at least 1"),
        (["inspect", "/no/such/folder"], "/no/such/folder"),
        (["job", "list", "--endpoint", "127.0.0.1:1"], "no reorder service answers at 127.0.0.1:1"),
        (["job", "list", "--endpoint", "nonsense"], "not HOST:PORT"),
        pytest.param(
            ["train", "--job", "x", "--endpoint", "127.0.0.1:1"],
            "no reorder service answers at 127.0.0.1:1",
            marks=pytest.mark.slow,
        ),
        (["preprocessor", "--reorder", "nonsense"], "not HOST:PORT"),
        (["preprocessor", "--listen", "nonsense"], "not HOST:PORT"),
        (["reorder", "--store", "carrier-pigeon:home"], "carrier-pigeon:home"),
        (["reorder", "--store", "redis://127.0.0.1:1/0"], "no Redis server answers"),
        (["reorder", "--keep-finished", "a week"], "--keep-finished 'a week' is neither DAYS,JOBS"),
        pytest.param(
            ["job", "delete", "x", "--endpoint", "127.0.0.1:1"],
            "no reorder service answers at 127.0.0.1:1",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_can_fix_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    if arguments[0] in ("demo", "inspect"):
        arguments = [*arguments, "--out", str(tmp_path / "out")]
    command = processes.start_command(arguments, tmp_path / "log", {}, ())
    try:
        assert command.wait(100.0) == 2
    finally:
        command.kill()
    (said,) = (tmp_path / "log").read_text().strip().splitlines()
    assert sentence in said


def test_what_the_user_can_fix_is_said_on_standard_error_and_nothing_on_standard_output(headrace, tmp_path: Path) -> None:
    result = headrace("demo", "--replicas", "0", "--out", str(tmp_path / "out"))
    assert (result.returncode, result.stdout) == (2, "")
    assert "topology.replicas" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_an_empty_folder_and_a_busy_port_are_told_too(headrace, cluster, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    result = headrace("demo", str(empty), "--out", str(tmp_path / "out"))
    assert (result.returncode, len(result.stderr.strip().splitlines())) == (2, 1)
    assert str(empty) in result.stderr
    cluster.start_reorder()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        reorder = ["reorder", "--listen", "127.0.0.1:0", "--store", f"embedded:{tmp_path / 'another'}"]
        preprocessor = ["preprocessor", "--reorder", cluster.endpoint]
        for service, option in (
            (reorder, "--listen"),
            (reorder, "--page"),
            (reorder, "--metrics"),
            (preprocessor, "--listen"),
            (preprocessor, "--flight-port"),
        ):
            result = headrace(*service, option, str(port) if option == "--flight-port" else f"127.0.0.1:{port}")
            # A log may stand above the sentence: of a service that still compiles, of pages that an earlier process left.
            sentences = [line for line in result.stderr.splitlines() if line.startswith("headrace ")]
            assert (result.returncode, len(sentences)) == (2, 1), result.stderr
            assert f"127.0.0.1:{port}" in sentences[0]
            assert f"give {option} another" in sentences[0]


@pytest.mark.slow
def test_a_trainer_of_a_job_that_was_done_before_says_so(headrace, calm, spec) -> None:
    job = calm.submit(spec("done-before", steps=1))
    calm.consume(job)
    result = headrace("train", "--endpoint", calm.endpoint, "--job", job, "--format", "json")
    assert (result.returncode, json.loads(result.stdout)["state"]) == (0, "done")
    assert "job 'done-before' was done before: nothing is left to train" in result.stderr


@pytest.mark.slow
def test_jobs_fit_into_a_narrow_terminal_and_nothing_unknown_is_shown_as_a_figure(
    headrace, cluster, spec, tmp_path: Path
) -> None:
    cluster.start_reorder()
    cluster.submit(spec("mine"))
    listed = headrace("job", "list", "--endpoint", cluster.endpoint)
    lines = listed.stdout.splitlines()
    assert lines[0].split() == ["job", "state", "steps", "samples", "quarantined", "shards"], listed.stderr
    assert lines[1].split()[:3] == ["mine", "indexing", "0"]
    shown = headrace("job", "show", "mine", "--endpoint", cluster.endpoint).stdout
    assert "no step is committed yet" in shown
    assert "2 x 2 microbatches" in shown
    assert "unknown" not in shown
    headrace("job", "pause", "mine", "--endpoint", cluster.endpoint)


def test_jobs_are_submitted_listed_shown_and_cancelled(
    headrace, cluster, spec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.start_reorder()
    endpoint = ["--endpoint", cluster.endpoint, "--format", "json"]
    path = tmp_path / "job.yaml"
    document = json.loads(spec("mine").to_json())

    def here(*arguments: str) -> tuple[int, str, str]:
        """The same in this process: exit code, standard output and standard error."""
        code = main([*arguments, *endpoint])
        return code, *capsys.readouterr()

    submitted = {"jobs": [{"job": "mine", "state": "indexing"}]}
    path.write_text(yaml.safe_dump(document))
    result = headrace("job", "submit", str(path), *endpoint)
    assert (result.returncode, json.loads(result.stdout)) == (0, submitted)
    code, out, _ = here("job", "submit", str(path))
    assert (code, json.loads(out)) == (0, submitted), "submitting the same spec again changes nothing"

    path.write_text(yaml.safe_dump({**document, "seed": 7}))
    result = headrace("job", "submit", str(path), *endpoint)
    assert (result.returncode, result.stdout) == (2, "")
    assert "another spec" in result.stderr

    path.write_text(yaml.safe_dump({**document, "global_bach": 7}))
    assert "global_bach" in here("job", "submit", str(path))[2]

    assert json.loads(here("job", "cancel", "mine")[1])["jobs"][0]["state"] == "cancelled"
    [row] = json.loads(here("job", "list")[1])["jobs"]
    assert (row["job"], row["state"], row["committed_steps"]) == ("mine", "cancelled", 0)
    assert json.loads(here("job", "show", "mine")[1])["state"] == "cancelled"
    assert "no job 'yours'" in here("job", "show", "yours")[2]
    refused = headrace("train", "--job", "mine", *endpoint)
    assert (refused.returncode, refused.stdout) == (2, "")
    remedy = "submit it by another name, or again after `headrace job delete mine`"
    assert f"headrace train: job 'mine' was cancelled: {remedy}\n" in refused.stderr


@pytest.mark.slow
def test_jobs_are_deleted_once_they_are_over_and_their_names_are_free(headrace, cluster, spec, tmp_path: Path) -> None:
    cluster.start_reorder()
    endpoint = ["--endpoint", cluster.endpoint, "--format", "json"]
    for name in ("first", "second", "third"):
        cluster.submit(spec(name))
    refused = headrace("job", "delete", "first", *endpoint)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "job 'first' is INDEXING and not over: end it with `headrace job cancel first` first" in refused.stderr
    for name in ("first", "second"):
        headrace("job", "cancel", name, *endpoint)
    partly = headrace("job", "delete", "second", "nobody", "first", *endpoint)
    assert (partly.returncode, json.loads(partly.stdout)) == (2, {"jobs": [{"job": "second", "state": "deleted"}]})
    assert "no job 'nobody'" in partly.stderr
    deleted = headrace("job", "delete", "first", "first", *endpoint)
    assert (deleted.returncode, json.loads(deleted.stdout)) == (0, {"jobs": [{"job": "first", "state": "deleted"}]})
    assert [row["job"] for row in json.loads(headrace("job", "list", "--all", *endpoint).stdout)["jobs"]] == ["third"]
    assert cluster.submit(spec("first", seed=7)) == "first"


def test_the_store_may_be_named_by_the_environment(headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its URL may hold a password, and every user of a machine reads its command lines."""
    monkeypatch.setenv("HEADRACE_STORE", "redis://:s3cretpassword@127.0.0.1:1/0")
    result = headrace("reorder", "--listen", "127.0.0.1:0")
    assert (result.returncode, "no Redis server answers at redis://" in result.stderr) == (2, True), result.stderr
    assert "s3cretpassword" not in result.stderr + headrace("reorder", "--help").stdout
