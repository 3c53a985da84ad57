"""Two preprocessors of which one cannot decode a kind of media: all ranks of a pipeline have the same samples, or end alike."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.ledger import ledger_sha256
from headrace.processes import Process, ProcessGroup
from tests.integration.trainers import END_S, losses, start, wait

pytestmark = pytest.mark.integration

# Probing reads headers, which needs no codec: only decoding shows that it is not there.
HOOK = """
import sys
if "preprocessor" in sys.argv:
    from headrace.quarantine import BadSampleError, Reason
    from headrace.preprocessor import image

    decode = image.decode

    def poor(data, *arguments):
        if data[:4] == b"\\x89PNG":
            raise BadSampleError(Reason.UNSUPPORTED_MEDIA, "there is no codec for PNG here")
        return decode(data, *arguments)

    image.decode = poor
"""
UNITS: dict[str, dict[str, int]] = {"encoder": {}, "llm": {}}
PLANNED = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}
STEPS = 4


def add_poor(cluster: Any, folder: Path) -> None:
    """A preprocessor without a codec for PNG, once it has joined."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    arguments = ["preprocessor", "--reorder", cluster.endpoint, "--threads", "1", "--budget-mib", "64"]
    process = Process("preprocessor", arguments, folder / "poor.log", {"PYTHONPATH": str(folder / "hook")})
    cluster.preprocessors.append(cluster.group.add(process))
    cluster.wait_for_preprocessors()


@pytest.fixture
def whole(calm: Any, spec: Any) -> str:
    """The ledger's hash where every preprocessor has every codec."""
    job = calm.submit(spec("every-codec", steps=STEPS, topology=PLANNED))
    calm.consume(job)
    with calm.client() as client:
        assert not client.quarantine(job)
    return ledger_sha256(calm.ledger(job))


@pytest.mark.slow
def test_what_one_of_two_can_decode_is_trained_on_by_all_ranks(cluster: Any, spec: Any, whole: str, tmp_path: Path) -> None:
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    add_poor(cluster, tmp_path)
    job = cluster.submit(spec("disagreement", steps=STEPS, topology=PLANNED))
    with ProcessGroup() as group:
        processes = start(group, cluster, job, tmp_path, UNITS, 2, 2)
        assert wait(processes) == [0] * 2, processes[0].last_words()
    assert len(losses(processes[0].log)) == STEPS
    assert ledger_sha256(cluster.ledger(job)) == whole
    assert "cannot decode sample" in (tmp_path / "reorder.log").read_text(), "the one without the codec was asked"


@pytest.mark.slow
def test_where_nobody_can_decode_it_all_ranks_train_without_it(cluster: Any, spec: Any, tmp_path: Path) -> None:
    cluster.start_reorder()
    add_poor(cluster, tmp_path)
    job = cluster.submit(spec("poor", steps=STEPS, topology=PLANNED))
    with ProcessGroup() as group:
        processes = start(group, cluster, job, tmp_path, UNITS, 2, 2)
        assert wait(processes) == [0] * 2, processes[0].last_words()
    consumed = {name for entry in cluster.ledger(job) for name in entry.samples}
    with cluster.client() as client:
        quarantined = {item.name: str(item.reason) for item in client.quarantine(job)}
    assert quarantined
    assert set(quarantined.values()) == {"unsupported_media"}
    assert consumed.isdisjoint(quarantined)
    assert len(consumed) + len(quarantined) == 16 * STEPS


@pytest.mark.slow
def test_where_the_one_with_the_codec_is_lost_all_ranks_go_on_or_end_alike(cluster: Any, spec: Any, tmp_path: Path) -> None:
    """Parts that it has decoded cannot be had any more. Where a rank lacks one, all end with one sentence."""
    cluster.start_reorder()
    cluster.add_preprocessors(1)
    add_poor(cluster, tmp_path)
    job = cluster.submit(spec("lost", steps=12, topology=PLANNED))
    with ProcessGroup() as group:
        processes = start(group, cluster, job, tmp_path, UNITS, 2, 2)
        deadline_s = time.monotonic() + END_S
        while not losses(processes[0].log):
            assert time.monotonic() < deadline_s, processes[0].last_words()
            time.sleep(0.05)  # polls a real process
        os.kill(cluster.preprocessors[0].pid, signal.SIGKILL)
        codes = wait(processes)
    with cluster.client() as client:
        message = client.show(job).message
        quarantined = client.quarantine(job)
    if "would have different samples" in message:
        assert all(codes)
        assert "there is no codec for PNG here" in message
    else:
        assert (codes, message) == ([0, 0], "")
        assert losses(processes[0].log) == losses(processes[1].log)
        assert quarantined
        assert len([name for entry in cluster.ledger(job) for name in entry.samples]) + len(quarantined) == 16 * 12
