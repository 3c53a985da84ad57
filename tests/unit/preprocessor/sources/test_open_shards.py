"""How many shards are open: what the jobs like to have, and never more than a process may have files."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.preprocessor.job_work import JobWork
from headrace.preprocessor.sources import list_shards
from headrace.preprocessor.sources.open_shards import OpenShards, max_open_shards
from headrace.sample import SampleRef
from headrace.spec import parse_spec

SOURCES, SHARDS = 24, 6


class Owner:
    """A job, as far as slots are concerned."""


def write_sources(folder: Path) -> None:
    for source in range(SOURCES):
        (folder / f"s{source}").mkdir()
        for shard in range(SHARDS):
            rows = pa.table({"text": [f"{source} {shard} {row}" for row in range(3)]})
            pq.write_table(rows, folder / f"s{source}" / f"{shard}.parquet")


def make_job(folder: Path, open_shards: OpenShards | None = None) -> JobWork:
    sources = [{"path": str(folder / f"s{source}")} for source in range(SOURCES)]
    job = JobWork("job", parse_spec({"name": "job", "sources": sources}), open_shards=open_shards)
    job.shards = tuple(list_shards(job.spec))
    return job


def read_all(job: JobWork, rows: int = 3) -> int:
    """The samples that are good, of so many rows of each shard, read in an order that goes over all shards for each row."""
    refs = [SampleRef(sample_id=n, shard=n % len(job.shards), row=n // len(job.shards)) for n in range(rows * len(job.shards))]
    return sum(len(job.probe(refs[start : start + 50])[0]) for start in range(0, len(refs), 50))


def open_parquet_files() -> int:
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).endswith(".parquet") for link in links)


def test_many_sources_stay_within_the_limit_and_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_sources(tmp_path)
    open_shards = OpenShards(most=10)
    first, second = make_job(tmp_path, open_shards), make_job(tmp_path, open_shards)
    with caplog.at_level(logging.WARNING, "headrace.preprocessor.sources.open_shards"):
        for job in (first, second):
            assert read_all(job, rows=1) == SOURCES * SHARDS
            assert open_parquet_files() <= 10
    assert len(caplog.messages) == 1
    assert "raise the limit of open files (ulimit -n) open_shards=10 wanted=768" in caplog.messages[0]
    first.close()
    second.close()
    assert open_parquet_files() == 0


def test_the_shard_that_was_not_read_for_longest_makes_room_whosever_it_is() -> None:
    one, other, shards = Owner(), Owner(), OpenShards(most=3)
    kept = [shards.slot(one, 0, 9), shards.slot(one, 1, 9), shards.slot(other, 0, 9)]
    assert shards.slot(one, 0, 9) is kept[0], "the oldest is shard 1 of `one` now"
    shards.slot(other, 1, 9)
    assert shards.slot(one, 0, 9) is kept[0]
    assert shards.slot(other, 0, 9) is kept[2]
    assert shards.slot(one, 1, 9) is not kept[1]
    assert len(shards.remove_job(one)) + len(shards.remove_job(other)) == 3


def test_a_job_keeps_no_more_than_it_likes_to_have() -> None:
    shards, job = OpenShards(most=100), Owner()
    first = shards.slot(job, 0, 2)
    for shard in range(1, 5):
        shards.slot(job, shard, 2)
    assert len(shards.remove_job(job)) == 2
    assert shards.slot(job, 0, 2) is not first


PROGRAM = """
import os, resource, sys
from pathlib import Path
from headrace.preprocessor.sources.open_shards import raise_file_limit
from tests.unit.preprocessor.sources.test_open_shards import make_job, read_all
for soft, hard in ((64, 512), (96, 96)):
    child = os.fork()  # a limit that was lowered cannot be raised again
    if child == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        raise_file_limit()
        print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], read_all(make_job(Path(sys.argv[1]))))
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_descriptors_do_not_run_out(tmp_path: Path) -> None:
    """24 sources with 6 shards of a descriptor each: 144. The limit is raised as far as it may be, and kept."""
    write_sources(tmp_path)
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{hard} {3 * SOURCES * SHARDS}" for hard in (512, 96)]


def test_files_are_left_for_other_things() -> None:
    assert {files: max_open_shards(files) for files in (12, 100, 1024, 1 << 20)} == {
        12: 8,
        100: 50,
        1024: 768,
        1 << 20: 1_048_320,
    }
