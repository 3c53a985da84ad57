"""Damaged data never stops a job, and each damaged sample is in the quarantine with its reason."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from headrace import trainer
from headrace.errors import ConflictError, JobFailedError

pytestmark = pytest.mark.integration

HOSTILE = Path(__file__).parent.parent / "data" / "hostile"


def test_a_job_over_every_hostile_archive_consumes_the_good_and_names_the_bad(calm, spec) -> None:
    job = calm.submit(spec("hostile", sources=[{"path": str(HOSTILE / "tars"), "name": "h"}], global_batch=8))
    calm.consume(job)
    status = calm.wait_for_state(job, "done")
    consumed = [name for entry in calm.ledger(job) for name in entry.samples]
    with calm.client() as client:
        reasons = {item.name: str(item.reason) for item in client.quarantine(job)}
    assert status.quarantined_samples == len(reasons)
    assert not set(consumed) & set(reasons)
    for good in ("h/good.tar/a", "h/good.tar/b", "h/good.tar/c", "h/one_bad_of_three.tar/a", "h/symlink.tar/b"):
        assert good in consumed
    # Found while indexing, while probing, and only when decoded.
    assert reasons["h/duplicate_keys.tar/a"] == "duplicate_key"
    assert reasons["h/placeholders_few.tar/p"] == "placeholder_mismatch"
    assert reasons["h/one_bad_of_three.tar/r"] == "corrupt_media"
    assert reasons["h/zero.tar"] == "archive_truncated"


@pytest.mark.slow
def test_a_shard_that_vanishes_fails_the_job_which_goes_on_when_it_is_back(cluster, spec, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for copy in ("one", "two"):
        shutil.copy(HOSTILE / "tars" / "good.tar", data / f"{copy}.tar")
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    vanishing = spec("vanishing", sources=[{"path": str(data)}], global_batch=2, window=1, shuffle_shards=1)
    job = cluster.submit(vanishing)

    def vanish(step: trainer.Step) -> None:
        if step.index == 0:
            data.rename(tmp_path / "elsewhere")
            cluster.preprocessors[0].terminate()  # a fresh one has no shard open
            cluster.preprocessors[0].wait(2.0)
            cluster.add_preprocessors(1)

    with pytest.raises(JobFailedError, match="cannot read the shard"):
        cluster.consume(job, vanish)
    (tmp_path / "elsewhere").rename(data)
    assert cluster.submit(vanishing) == job
    cluster.consume(job)
    status = cluster.wait_for_state(job, "done")
    consumed = [name for entry in cluster.ledger(job) for name in entry.samples]
    assert (len(consumed), len(set(consumed)), status.quarantined_samples) == (6, 6, 0)


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("missing", {"sources": [{"path": "/no/such/data"}]}, "/no/such/data"),
        ("no-shards", {"sources": [{"path": str(HOSTILE / "images")}]}, "nothing that says what they show"),
        ("no-samples", {"sources": [{"path": str(HOSTILE / "tars" / "empty.tar")}]}, "no usable sample"),
        (
            "no-bytes",
            {"sources": [{"path": str(HOSTILE / "tars" / "zero.tar")}]},
            "tars/zero.tar is refused (archive_truncated: the archive has 0 bytes); `headrace inspect` shows what is wrong",
        ),
        ("no-tokenizer", {"text": {"tokenizer": "/no/such/tokenizer.json"}}, "/no/such/tokenizer.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_that_cannot_begin_fails_with_a_sentence(calm, spec, name: str, fields: dict, sentence: str) -> None:
    job = calm.submit(spec(name, **fields))
    assert sentence in calm.wait_for_state(job, "failed").message
    with pytest.raises((JobFailedError, ConflictError), match=re.escape(sentence)):
        calm.consume(job)


def test_a_job_that_found_no_sample_reads_its_shards_anew_when_they_are_mended(calm, spec, tmp_path: Path) -> None:
    shard = tmp_path / "some.tar"
    shard.touch()
    submitted = spec("mended", sources=[{"path": str(tmp_path)}], global_batch=2)
    job = calm.submit(submitted)
    assert "some.tar is refused" in calm.wait_for_state(job, "failed").message
    shutil.copy(HOSTILE / "tars" / "good.tar", shard)
    assert calm.submit(submitted) == job
    assert calm.consume(job)
    assert (status := calm.wait_for_state(job, "done")).quarantined_samples == 0, status


@pytest.mark.slow
def test_what_records_hold_cannot_fail_a_job_or_command_a_terminal(headrace, calm, spec, tmp_path: Path) -> None:
    """Lone surrogates in a value, in a field's name and in a turn; names of members that clear the screen and begin a line."""
    texts, members = tmp_path / "lines", tmp_path / "members"
    texts.mkdir()
    members.mkdir()
    good = json.dumps({"texts": ["a line of text that is long enough"]})
    lines = [
        good,
        '{"texts": ["a\\ud800b"]}',
        '{"texts": 7, "\\ud800": 1}',
        '{"messages": [{"\\ud800": 1}]}',
        '{"image": "\\ud800"}',
    ]
    (texts / "a.jsonl").write_text("\n".join([*lines, good]) + "\n")
    with tarfile.open(members / "b.tar", "w") as archive:
        for name in ("ok.json", "\x1b[2Jcleared.json", "line\n12:00:00.000 reorder INFO forged.json"):
            content = good.encode() if name == "ok.json" else b"{"
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    job = calm.submit(spec("surrogates", sources=[{"path": str(folder)} for folder in (texts, members)], global_batch=8))
    calm.consume(job)
    calm.wait_for_state(job, "done")
    consumed = [name for entry in calm.ledger(job) for name in entry.samples]
    assert len(consumed) == 3
    with calm.client() as client:
        assert len(client.quarantine(job)) == 6
    bad = next(item.name for item in calm.client().quarantine(job) if "cleared" in item.name)
    for command in (
        ["job", "quarantine", job, "--endpoint", calm.endpoint],
        ["job", "show", job, "--endpoint", calm.endpoint],
        ["replay", job, bad, "--endpoint", calm.endpoint],
        ["inspect", str(members), "--out", str(tmp_path / "out")],
    ):
        shown = headrace(*command)
        assert "cleared" in shown.stdout or command[0] == "inspect"  # which shows the first few
        assert not [c for c in shown.stdout + shown.stderr if not (c.isprintable() or c == "\n")]
    logged = "".join(process.log.read_text() for process in (calm.reorder, *calm.preprocessors))
    assert "\x1b" not in logged
    assert not [line for line in logged.splitlines() if line.startswith("12:00:00.000")]
