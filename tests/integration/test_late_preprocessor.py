"""A preprocessor that hangs: what it had to do is done by the other before its silence is noticed."""

from __future__ import annotations

import os
import signal

import pytest

from headrace import trainer
from headrace.ledger import ledger_sha256

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_what_a_preprocessor_hangs_on_is_probed_and_decoded_by_the_other(cluster, spec, undisturbed) -> None:
    """With one step at a time, it hangs on just what the trainer waits for.

    One that is stopped has not always work just then, and may be slower than its silence where the machine is busy: each is
    stopped until it was late once, in half of the steps at most.
    """
    num_steps = 16
    cluster.start_reorder()
    cluster.add_preprocessors(2)
    cluster.wait_for_preprocessors()
    job = cluster.submit(spec("disturbed", steps=num_steps, part_samples=2, window=1))
    log = cluster.folder / "reorder.log"
    with cluster.client() as client, trainer.connect(cluster.endpoint, job=job) as loader:
        members = {member.endpoint: member.preprocessor for member in client.show(job).preprocessors}
        processes = {members[process.endpoint()]: process.pid for process in cluster.preprocessors}
        never_late = list(processes)
        stopped, logged = None, 0
        try:
            for step in loader:
                assert sum(len(microbatch.data.sample_ids) for microbatch in step) == 16
                if stopped is not None:
                    os.kill(processes[stopped], signal.SIGCONT)
                    late, left = (log.read_text().find(f"{what} preprocessor={stopped} ", logged) for what in ("late", "left"))
                    if late >= 0 and not 0 <= left < late:
                        never_late.remove(stopped)
                    stopped = None
                elif never_late:
                    stopped, logged = never_late[step.index // 2 % len(never_late)], len(log.read_text())
                    os.kill(processes[stopped], signal.SIGSTOP)
                loader.commit(step)
        finally:
            for pid in processes.values():
                os.kill(pid, signal.SIGCONT)
    assert not never_late, "with its probe, or with parts"
    assert ledger_sha256(cluster.ledger(job)) == undisturbed(num_steps)
