"""A preprocessor that hangs, as a machine does that swaps or whose disk is gone: it neither works nor dies."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from headrace import trainer
from headrace.ledger import ledger_sha256

pytestmark = pytest.mark.integration

NEVER_S = 3600.0


def test_the_job_goes_on_without_a_preprocessor_that_hangs(cluster, spec, undisturbed) -> None:
    """Though a fetch from it takes two minutes to fail, and the other has to decode its parts again."""
    cluster.start_reorder()
    cluster.add_preprocessors(2)
    cluster.wait_for_preprocessors()
    hung = cluster.preprocessors[0].pid
    # First the service gives its parts to the other, and it has to join anew; then they are asked of the other.
    for job, hedge_s in ("moved", NEVER_S), ("asked-of-another", 0.2):
        cluster.submit(spec(job, steps=8, part_samples=2))
        seen: Counter[int] = Counter()
        try:
            with trainer.connect(cluster.endpoint, job=job, hedge_s=hedge_s, prefetch_parts=4) as loader:
                for step in loader:
                    seen.update(i for microbatch in step for i in microbatch.data.sample_ids.tolist())
                    if step.index == 1:
                        os.kill(hung, signal.SIGSTOP)
                    loader.commit(step)
                statistics = loader.statistics()
        finally:
            os.kill(hung, signal.SIGCONT)
        assert seen == Counter(range(8 * 16))
        assert ledger_sha256(cluster.ledger(job)) == undisturbed(8)
        assert statistics.num_fetched_again > 0, "parts that were asked of the one that hangs came from the other"
        assert (statistics.num_hedged > 0) == (hedge_s < NEVER_S)
        cluster.wait_for_preprocessors()

    again = cluster.submit(spec("awake", steps=8))
    cluster.consume(again)
    assert ledger_sha256(cluster.ledger(again)) == undisturbed(8)
