"""The audit: a right ledger passes, and whatever is wrong is found and named."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.ledger import LedgerEntry
from headrace.manifest import ShardInfo, ShardTable, split_name
from headrace.quarantine import Reason, Rejected
from headrace.reorder_service.jobs.audit import MAX_FINDINGS, Check, Finding, Rule, audit
from headrace.reorder_service.jobs.batches import GlobalBatches
from headrace.reorder_service.jobs.counted_shards import CountedShards
from headrace.sample import SampleRef
from headrace.spec import JobSpec, parse_spec


class Job:
    """A job as it should be: its order, its data set's names, and the ledger and the quarantine that they come to."""

    def __init__(
        self, rows: list[list[int]], *, bad: set[tuple[int, int]] = frozenset(), changes: tuple = (), **fields: object
    ) -> None:
        """rows: of the shards of each source. bad: (shard, row) that are refused."""
        sources = [{"path": f"/d/s{number}"} for number in range(len(rows))]
        self.spec: JobSpec = parse_spec({"name": "job", "sources": sources, "global_batch": 4, "shuffle_shards": 2} | fields)
        infos, counts = [], []
        for source, of_source in enumerate(rows):
            for number, num_rows in enumerate(of_source):
                infos.append(ShardInfo(source=source, url="", name=f"s{source}/sub/{number}.tar"))
                counts.append(num_rows)
        self.shards = [(info.name, num_rows) for info, num_rows in zip(infos, counts, strict=True)]
        self.batches = GlobalBatches(self.spec, CountedShards(self.spec, ShardTable.of(infos), np.array(counts)), changes)
        self.batches.set_up_order()
        self.ledger: list[LedgerEntry] = []
        self.quarantined: dict[str, Rejected] = {}
        for step in range(self.batches.num_steps):
            names = []
            for ref in self.batches.refs(step):
                if (ref.shard, ref.row) in bad:
                    self.quarantined.setdefault(self.name(ref), self.rejected(ref))
                else:
                    names.append(self.name(ref))
            self.ledger.append(LedgerEntry(step=step, samples=tuple(sorted(names)), loss=math.nan))

    def name(self, ref: SampleRef) -> str:
        return f"{self.shards[ref.shard][0]}/in/{ref.row}"

    def rejected(self, ref: SampleRef) -> Rejected:
        return Rejected(name=self.name(ref), reason=Reason.CORRUPT_MEDIA, detail="", sample_id=ref.sample_id, row=ref.row)

    def edit(self, step: int, *, without: str = "", extra: str = "") -> None:
        """Take one name out of a step, put another one in."""
        names = list(self.ledger[step].samples)
        if without:
            names.remove(without)
        self.ledger[step] = replace(self.ledger[step], samples=tuple(sorted([*names, *([extra] if extra else [])])))

    def audit(self, *, num_steps: int | None = None, by_name: bool = False) -> dict[Rule, Check]:
        checks = audit(
            iter(self.ledger),
            num_steps=len(self.ledger) if num_steps is None else num_steps,
            refs=self.batches.refs,
            shards=self.shards,
            quarantined=self.quarantined.values(),
            name_of=self.name if by_name else None,
        )
        return {check.rule: check for check in checks}

    def findings(self, **options: object) -> list[tuple[Rule, Finding]]:
        return [(rule, finding) for rule, check in self.audit(**options).items() for finding in check.findings]


def plain(**fields: object) -> Job:
    """Two shards of 6 and 5 rows, two epochs: eleven places an epoch, six steps; row 2 of shard 1 is refused."""
    return Job([[6, 5]], bad={(1, 2)}, epochs=2, **fields)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    rows = draw(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any), min_size=1, max_size=3))
    places = [(shard, row) for shard, count in enumerate(count for of in rows for count in of) for row in range(count)]
    size = draw(st.integers(1, 12))
    weights = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=len(rows), max_size=len(rows)).filter(any))
    changes = draw(st.sampled_from([(), ((2, tuple(weights)),)]))
    return Job(
        rows,
        bad=draw(st.sets(st.sampled_from(places), max_size=4)),
        changes=changes,
        global_batch=size,
        shuffle_shards=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 9)),
        **draw(st.sampled_from([{"epochs": 1}, {"epochs": 3}, {"steps": 7}])),
    )


@given(jobs(), st.booleans(), st.integers(0, 99))
def test_a_right_ledger_passes_under_way_or_over(job: Job, by_name: bool, committed: int) -> None:
    del job.ledger[committed:]
    assert job.findings(by_name=by_name) == []
    checks = job.audit()
    assert checks[Rule.ONCE].compared.startswith(f"{sum(len(entry.samples) for entry in job.ledger):,} samples")


@given(jobs(), st.data())
def test_a_lost_sample_is_found_in_its_step_and_its_shard(job: Job, data: st.DataObject) -> None:
    step = data.draw(st.sampled_from([entry.step for entry in job.ledger if entry.samples] or [None]))
    if step is None:
        return
    name = data.draw(st.sampled_from(job.ledger[step].samples))
    job.edit(step, without=name)
    sentences = [finding.sentence for rule, finding in job.findings() if (rule, finding.step) == (Rule.PLACES, step)]
    assert any(f" of {name.rpartition('/in/')[0]}," in sentence and sentence.endswith("1 missing") for sentence in sentences)
    assert f"step {step} lacks {name}, which the order puts there" in [f.sentence for _, f in job.findings(by_name=True)]


@given(jobs(), st.data())
def test_a_ledger_with_any_one_name_changed_does_not_pass(job: Job, data: st.DataObject) -> None:
    """Repeated, moved, foreign or quarantined, whatever it becomes: by name always, and by counts in a single whole epoch."""
    step = data.draw(st.sampled_from([entry.step for entry in job.ledger if entry.samples] or [None]))
    if step is None:
        return
    old = data.draw(st.sampled_from(job.ledger[step].samples))
    others = sorted({name for entry in job.ledger for name in entry.samples} | set(job.quarantined) | {"x/y/z"})
    new = data.draw(st.sampled_from(others).filter(lambda name: name != old))
    job.edit(step, without=old, extra=new)
    assert job.findings(by_name=True)
    if job.spec.epochs == 1 and not job.batches.changes:
        assert job.findings()


def test_a_repeated_sample_is_named_with_both_steps() -> None:
    job = plain()
    name = next(name for name in job.ledger[0].samples if "0.tar" in name)
    job.edit(1, extra=name)
    [(rule, finding)] = job.findings()
    assert (rule, finding.step, finding.sample) == (Rule.ONCE, 1, name)
    assert finding.sentence == f"step 1 has {name}, which step 0 has in the same epoch already"


def test_a_repeated_sample_in_the_place_of_another_of_its_shard() -> None:
    job = plain()
    name = next(name for name in job.ledger[0].samples if "0.tar" in name)
    lost = next(name for name in job.ledger[1].samples if "0.tar" in name)
    job.edit(1, without=lost, extra=name)
    rules = [rule for rule, _ in job.findings()]
    assert rules == [Rule.PLACES, Rule.ONCE, Rule.WHOLE]


def test_a_sample_that_moved_to_another_step_is_missing_here_and_too_many_there() -> None:
    job = plain()
    name = job.ledger[0].samples[0]
    job.edit(0, without=name)
    job.edit(1, extra=name)
    assert [(rule, finding.step, finding.sentence.rpartition(": ")[2]) for rule, finding in job.findings()] == [
        (Rule.PLACES, 0, "1 missing"),
        (Rule.PLACES, 1, "1 too many"),
    ]


def test_two_samples_of_a_shard_that_changed_places_are_found_by_name_only() -> None:
    job = plain()
    one, other = (next(name for name in job.ledger[step].samples if "0.tar" in name) for step in (0, 1))
    job.edit(0, without=one, extra=other)
    job.edit(1, without=other, extra=one)
    assert job.findings() == []
    assert [finding.sample for _, finding in job.findings(by_name=True)] == [other, one, one, other]


@pytest.mark.parametrize(
    ("gone", "sentence"), [((2,), "step 2 is not in the ledger"), ((1, 2), "steps 1 to 2 are not in the ledger")]
)
def test_missing_steps_are_named_and_cost_the_epoch_its_samples(gone: tuple[int, ...], sentence: str) -> None:
    job = plain()
    count = len(job.ledger)
    job.ledger = [entry for entry in job.ledger if entry.step not in gone]
    checks = job.audit(num_steps=count)
    assert [finding.sentence for finding in checks[Rule.STEPS].findings] == [sentence]
    assert checks[Rule.WHOLE].findings
    assert not checks[Rule.PLACES].findings, "the steps that are there are right"


def test_a_ledger_that_ends_early_and_one_that_goes_on_too_long() -> None:
    job = plain()
    assert [f.sentence for _, f in job.findings(num_steps=len(job.ledger) + 2)] == ["steps 6 to 7 are not in the ledger"]
    assert [f.sentence for _, f in job.findings(num_steps=5)] == ["step 5 is in the ledger, but only 5 steps are committed"]


def test_a_step_that_comes_twice_is_named() -> None:
    job = plain()
    job.ledger.insert(3, job.ledger[1])
    assert [(rule, f.sentence) for rule, f in job.findings(num_steps=6)] == [(Rule.STEPS, "step 1 comes again behind step 2")]


def test_a_quarantined_sample_that_was_consumed_later_is_named() -> None:
    job = plain()
    [name] = job.quarantined
    assert job.quarantined[name].sample_id < 11, "refused in the first epoch"
    job.edit(5, extra=name)
    since = job.quarantined[name].sample_id // 4
    assert [(rule, f.sentence) for rule, f in job.findings()] == [
        (Rule.QUARANTINE, f"step 5 has {name}, which was quarantined in step {since}")
    ]


def test_a_sample_may_be_consumed_before_it_is_refused() -> None:
    """As where the data was damaged on the way: the first epoch has it, the second one and the third have not."""
    job = Job([[6, 5]], epochs=3)
    places = {}
    for step in range(job.batches.num_steps):
        for ref in job.batches.refs(step):
            if (ref.shard, ref.row) == (1, 2):
                places.setdefault(ref.sample_id // 11, ref)
    for epoch in (1, 2):
        job.edit(places[epoch].sample_id // 4, without=job.name(places[epoch]))
    job.quarantined = {job.name(places[1]): job.rejected(places[1])}
    assert job.findings(by_name=True) == []


def test_an_entry_that_indexing_refused_has_no_place_and_is_not_consumed() -> None:
    job = plain()
    name = "s0/sub/0.tar/in/99"
    job.quarantined[name] = Rejected(name=name, reason=Reason.DUPLICATE_KEY, detail="")
    assert job.findings() == []
    assert "1 damaged" in job.audit()[Rule.QUARANTINE].compared
    lost = next(name for name in job.ledger[0].samples if "0.tar" in name)
    job.edit(0, without=lost, extra=name)
    assert f"step 0 has {name}, which was quarantined when its shard was indexed" in [f.sentence for _, f in job.findings()]


def test_a_quarantined_sample_must_stand_where_the_order_has_it() -> None:
    job = plain()
    [(name, item)] = job.quarantined.items()
    job.quarantined[name] = replace(item, row=3)
    [finding] = job.audit()[Rule.QUARANTINE].findings
    assert finding.sentence == f"{name} is quarantined as sample #{item.sample_id}, which is row 2 of s0/sub/1.tar"


def test_a_row_may_be_unknown_and_a_refusal_still_to_come() -> None:
    """Of a store that an earlier release wrote, and of a step that is committed while the audit goes on."""
    job = plain()
    [(name, item)] = job.quarantined.items()
    job.quarantined[name] = replace(item, row=None)
    assert job.findings() == []
    del job.ledger[item.sample_id // 4 :]
    assert job.findings() == []


def test_another_sample_in_the_second_epoch_is_found_though_the_numbers_agree() -> None:
    job = plain()
    name = next(name for name in job.ledger[4].samples if "0.tar" in name)
    job.edit(4, without=name, extra="s0/sub/0.tar/in/99")
    [(rule, finding)] = job.findings()
    assert rule is Rule.WHOLE
    assert finding.sentence.startswith("epoch 1 of s0/sub/0.tar ended with step 5")


def test_a_name_of_no_shard_is_named() -> None:
    job = plain()
    job.edit(0, extra="s0/sub/7.tar/in/1")
    job.edit(1, extra="s0/sub/1.tar")
    assert [finding.sample for _, finding in job.findings()] == ["s0/sub/7.tar/in/1", "s0/sub/1.tar"]


def test_findings_are_counted_all_and_kept_as_far_as_they_are_read() -> None:
    job = Job([[500]], global_batch=1)
    job.ledger = [replace(entry, samples=()) for entry in job.ledger]
    check = job.audit()[Rule.PLACES]
    assert (check.num_findings, len(check.findings)) == (500, MAX_FINDINGS)


def test_a_long_ledger_is_read_once_and_holds_one_epoch_of_names() -> None:
    job = Job([[3, 2]], epochs=400, global_batch=7)
    held = []

    class Counted(str):
        alive = 0

        def __new__(cls, text: str) -> Counted:
            cls.alive += 1
            return super().__new__(cls, text)

        def __del__(self) -> None:
            Counted.alive -= 1

    def entries():
        for entry in job.ledger:
            held.append(Counted.alive)
            yield replace(entry, samples=tuple(Counted(name) for name in entry.samples))

    checks = audit(entries(), num_steps=len(job.ledger), refs=job.batches.refs, shards=job.shards, quarantined=[])
    assert not any(check.num_findings for check in checks)
    assert max(held) <= 2 * 7 + 5


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("a/b.tar/k", (0, "k")),
        ("a/b.tar/k/l", (0, "k/l")),
        ("a/c/b.tar/k", (1, "k")),
        ("a/b.tar", (0, "")),
        ("a/b.tarr/k", None),
        ("a", None),
        ("", None),
    ],
)
def test_a_name_is_split_at_its_shard(name: str, place: tuple[int, str] | None) -> None:
    assert split_name(name, {"a/b.tar": 0, "a/c/b.tar": 1}) == place
