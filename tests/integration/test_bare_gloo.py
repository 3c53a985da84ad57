"""Gloo alone, the rival of a pipeline's actions: its two processes answer for each of them, and are not waited for in vain."""

from __future__ import annotations

import multiprocessing

import pytest

from benchmarks.pipeline.bare_gloo import answer, overheads_s

pytestmark = pytest.mark.integration


def test_every_action_of_both_processes_has_an_overhead() -> None:
    found = overheads_s(3, rows=2, sleep_s=0.0, rounds=2)
    assert len(found) == 2 * 3 * 2 * 2, "processes, microbatches, forward and backward, rounds"
    assert min(found) > 0.0


def test_a_process_that_ends_or_hangs_is_not_waited_for() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with pytest.raises(RuntimeError, match=r"^two processes over gloo alone have not ended in time"):
        answer(ours, deadline_s=0.0)
    theirs.close()
    with pytest.raises(RuntimeError, match=r"^one of two processes over gloo alone ended early"):
        answer(ours, deadline_s=0.0)
