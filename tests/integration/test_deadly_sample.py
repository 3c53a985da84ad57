"""A sample, or a shard, that preprocessors die of: found, quarantined, and the job goes on with all others."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.processes import Process
from tests.nursery.forked_commands import HOOK

pytestmark = pytest.mark.integration

DEADLY = "deadly"
DYING = f"""
import os, signal
from headrace.preprocessor import decoding, job_work

def dies(of, what):
    def method(*arguments, **named):
        if "{DEADLY}" in repr(arguments):
            os.kill(os.getpid(), signal.SIGKILL)  # as a kernel without memory does
        return what(*arguments, **named)
    setattr(of, what.__name__, method)

stage = os.environ["DIES_OF"]
if stage == "index":
    dies(job_work, job_work.open_shard)
else:
    dies(decoding.SampleProcessor, getattr(decoding.SampleProcessor, stage))
"""


@pytest.fixture
def fragile(cluster: Any, tmp_path: Path) -> Any:
    """(stage) -> starts two preprocessors that die of what is deadly at that stage, and start again whenever they have died."""
    stopped = threading.Event()
    threads = []

    def start(stage: str) -> list[int]:
        hook = tmp_path / "dying.py"
        hook.write_text(DYING)
        environment = {HOOK: str(hook), "DIES_OF": stage}
        arguments = ["preprocessor", "--reorder", cluster.endpoint, "--threads", "1", "--budget-mib", "64"]
        processes = [Process("preprocessor", arguments, tmp_path / f"fragile-{n}.log", environment) for n in range(2)]
        deaths = [0]

        def watch() -> None:
            while not stopped.wait(0.05):
                for process in processes:
                    if process.exit_code() is not None:
                        deaths[0] += 1
                        process.start()

        for process in processes:
            cluster.group.add(process)
        threads.append(threading.Thread(target=watch))
        threads[-1].start()
        return deaths

    yield start
    stopped.set()
    for thread in threads:
        thread.join()


def write_shards(folder: Path) -> None:
    """Two of eight short texts each; the fifth of the second is deadly, and so is the third shard as a whole."""
    for shard in range(2):
        texts = [f"line {row} of shard {shard}, long enough to learn from" for row in range(8)]
        if shard == 1:
            texts[5] = DEADLY + " line"
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps({"texts": [text]}) + "\n" for text in texts))


@pytest.mark.parametrize("stage", ["load", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("decode_into", "index"))])
def test_a_job_outlives_what_its_preprocessors_die_of(cluster: Any, spec: Any, fragile: Any, tmp_path: Path, stage: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_shards(data)
    if stage == "index":
        (data / "1.jsonl").rename(data / f"{DEADLY}.jsonl")
    cluster.start_reorder()
    deaths = fragile(stage)
    job = cluster.submit(spec("deadly", sources=[{"path": str(data), "name": "s"}], global_batch=8, window=2))
    began_s = time.monotonic()
    cluster.consume(job)
    print(f"{stage}: {deaths[0]} deaths, {time.monotonic() - began_s:.1f} s")
    cluster.wait_for_state(job, "done")
    consumed = [name for entry in cluster.ledger(job) for name in entry.samples]
    with cluster.client() as client:
        quarantined = {item.name: item for item in client.quarantine(job)}
    if stage == "index":
        assert (len(consumed), set(quarantined)) == (8, {f"s/{DEADLY}.jsonl"})
    else:
        assert (len(consumed), set(quarantined)) == (15, {"s/1.jsonl/5"})
    (item,) = quarantined.values()
    assert str(item.reason) == "killed_preprocessors"
    assert re.search("killed [4-9] preprocessors", item.detail), "four, and perhaps who had a copy because another was late"
    assert "Traceback" not in (cluster.folder / "reorder.log").read_text()
    assert deaths[0] <= 8
