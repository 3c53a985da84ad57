"""A preprocessor that hangs: what it had to do is done by the other before its silence is noticed."""

from __future__ import annotations

import os
import signal

import pytest

import trainer
from headrace.ledger import ledger_sha256

pytestmark = pytest.mark.integration


def test_what_a_preprocessor_hangs_on_is_probed_and_decoded_by_the_other(cluster, spec, undisturbed) -> None:
    """With one step at a time, it hangs on just what the trainer waits for."""
    cluster.start_reorder()
    cluster.add_preprocessors(2)
    cluster.wait_for_preprocessors()
    job = cluster.submit(spec("disturbed", steps=4, part_samples=2, window=1))
    with cluster.client() as client, trainer.connect(cluster.endpoint, job=job) as loader:
        members = {member.endpoint: member.preprocessor for member in client.show(job).preprocessors}
        processes = {members[process.endpoint()]: process.pid for process in cluster.preprocessors}
        first, second = processes.values()
        try:
            for step in loader:
                assert sum(len(microbatch.data.sample_ids) for microbatch in step) == 16
                match step.index:
                    case 0:
                        os.kill(first, signal.SIGSTOP)
                    case 1:
                        os.kill(first, signal.SIGCONT)
                    case 2:
                        os.kill(second, signal.SIGSTOP)
                loader.commit(step)
        finally:
            for pid in (first, second):
                os.kill(pid, signal.SIGCONT)
    log = (cluster.folder / "reorder.log").read_text()
    for name in processes:
        late, left = (log.find(f"{what} preprocessor={name} ") for what in ("late", "left"))
        assert 0 <= late < (left if left >= 0 else len(log)), "with its probe, or with parts"
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(4)
