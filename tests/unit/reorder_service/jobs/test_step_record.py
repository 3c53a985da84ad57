"""What a committed step has of each source: taken, cut, filtered and refused samples, each counted once."""

from __future__ import annotations

from headrace.quarantine import Reason, Rejected
from headrace.reorder_service.jobs.planned_step import PlannedStep, RankCommit
from headrace.reorder_service.store.progress import Amounts
from headrace.sample import Probe, SampleRef


def test_samples_are_counted_by_what_became_of_them() -> None:
    step = PlannedStep(index=0, refs=[SampleRef(sample_id=n, shard=n % 2, row=n) for n in range(6)])
    step.probes = {n: Probe(name=f"s{n}", num_tokens=10, num_targets=4, is_truncated=n == 0) for n in (0, 1, 2)}
    step.rejected = [
        Rejected(name=f"s{n}", reason=reason, detail="", sample_id=n, row=n)
        for n, reason in ((3, Reason.FILTERED), (4, Reason.TOO_SHORT), (5, Reason.FILTERED))
    ]
    late = Rejected(name="s2", reason=Reason.CORRUPT_MEDIA, detail="", sample_id=2, row=2)
    step.commits[0] = RankCommit(rejected=(late,), loss=1.0, step_s=1.0, data_wait_s=0.0)
    record, quarantined = step.record(lambda shard: f"source-{shard}")
    assert record.delivered == {
        "source-0": Amounts(samples=1, tokens=10, truncated=1, refused=2),
        "source-1": Amounts(samples=1, tokens=10, filtered=2),
    }
    assert sorted(item.name for item in quarantined) == ["s2", "s3", "s4", "s5"]
