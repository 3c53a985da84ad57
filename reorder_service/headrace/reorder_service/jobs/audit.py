"""Audit of a job's ledger: proves that every sample was used exactly once (design section 3, invariant 3). Does no I/O.

The ledger names the samples of every committed step. The global order says at which places each row of the data set stands,
as a pure function of spec, manifest and mixture. The quarantine names the refused rows, and the place at which each was first
refused. The audit compares the three by these rules:

    steps        the committed steps are 0 .. n - 1, each once and in order
    places       every step has as many samples of each shard as the order puts there, less the quarantined ones
    once         no name occurs twice in one epoch of its shard
    whole        in every complete epoch of a shard, the names consumed and the names quarantined are as many as its rows, and
                 they are the names of its first whole epoch
    quarantine   every quarantined name has a place of its shard, and is not consumed from that step on

Where all five hold, each complete epoch of a shard has each of its rows once, consumed or quarantined, and the epoch that has
begun repeats nothing and leaves out nothing but what is quarantined.

What this does not prove: the ledger has names and the order has rows, and only the shards themselves know which key stands in
which row. So the audit does not see that two samples of one shard changed places within an epoch, nor that a key which is not
in the data set replaced another in the very first epoch. It sees both if the caller can name the rows (`name_of`).

The audit keeps the quarantine in memory and the names of each shard's unfinished epoch, but not the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.ledger import LedgerEntry
from headrace.manifest import split_name
from headrace.quarantine import Rejected
from headrace.sample import SampleRef

MAX_FINDINGS = 100  # most findings kept per rule; one lost step of a large job may show in every shard


class Rule(StrEnum):
    """A rule that a ledger must satisfy; the module's docstring defines each."""

    STEPS = "steps"
    PLACES = "places"
    ONCE = "once"
    WHOLE = "whole"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One violation of a rule, as a sentence. `sample` is the name of the sample at fault; empty where no single one is."""

    step: int
    sentence: str
    sample: str = ""


@dataclass(slots=True, kw_only=True)
class Check:
    """The result for one rule: what was compared, and the first MAX_FINDINGS of its `num_findings` violations."""

    rule: Rule
    compared: str = ""
    num_findings: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        self.num_findings += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)


def audit(
    entries: Iterable[LedgerEntry],
    *,
    num_steps: int,
    refs: Callable[[int], Sequence[SampleRef]],
    shards: Sequence[tuple[str, int]],
    quarantined: Iterable[Rejected],
    name_of: Callable[[SampleRef], str] | None = None,
) -> list[Check]:
    """Audit a ledger, and return the checks in the order of Rule; the ledger is sound where none has a finding.

    num_steps: number of committed steps. refs: returns the samples of a step, in the order of their places. shards: name and
    number of rows of each shard, in manifest order. quarantined: refusals at later steps are ignored. name_of: returns the name
    of the sample in a row, where the shards can be read; then every step's names are compared one by one.
    """
    run = _Audit(num_steps, shards, quarantined, name_of)
    for entry in entries:
        run.enter(entry, refs)
    return run.close()


class _Shard:
    """What the audit has seen of one shard so far."""

    def __init__(self, name: str, num_rows: int) -> None:
        self.name = name
        self.num_rows = num_rows
        self.places = 0
        self.epoch = 0
        """The first epoch of the shard that is not complete."""
        self.seen: dict[int, dict[str, int]] = {}
        """Epoch -> name -> step that consumed it, for the epochs from `epoch` on."""
        self.refused_rows: set[int] = set()
        self.refused: dict[str, int] = {}
        """Quarantined name -> step at which it was refused."""
        self.names_hash: int | None = None
        """Hash of the shard's set of names, known once an epoch was whole."""

    @property
    def begun(self) -> int:
        """The last epoch of the shard that has begun; -1: none has."""
        return (self.places - 1) // self.num_rows if self.places else -1

    def enter(self, name: str, step: int) -> int | None:
        """Count a name into the first unfinished epoch that lacks it, and return None.

        Where every epoch that has begun has the name already, return the step that consumed it in the last of them.

        A step at the border of two epochs has names of both, and does not tell them apart. But it must have all names that the
        older epoch still lacks, so those belong to the older one.
        """
        last = None
        for epoch in range(self.epoch, self.begun + 1):
            names = self.seen.setdefault(epoch, {})
            if name not in names:
                names[name] = step
                return None
            last = names[name]
        return last

    def complete(self) -> Iterator[tuple[int, int, bool]]:
        """Close the epochs whose places have all been walked over.

        Yield (epoch, number of names consumed, whether those and the refused names are all names of the shard).
        """
        while self.places >= (self.epoch + 1) * self.num_rows:
            consumed = self.seen.pop(self.epoch, {})
            names = frozenset(consumed).union(self.refused)
            whole = len(names) == self.num_rows and self.names_hash in (None, hash(names))
            if whole:
                self.names_hash = hash(names)
            yield self.epoch, len(consumed), whole
            self.epoch += 1


class _Audit:
    """The state of an audit: its checks, and how far it has come through the ledger."""

    def __init__(
        self,
        num_steps: int,
        shards: Sequence[tuple[str, int]],
        quarantined: Iterable[Rejected],
        name_of: Callable[[SampleRef], str] | None,
    ) -> None:
        self.checks = {rule: Check(rule=rule) for rule in Rule}
        self._num_steps = num_steps
        self._shards = [_Shard(name, num_rows) for name, num_rows in shards]
        self._numbers = {name: number for number, (name, _) in enumerate(shards)}
        self._name_of = name_of
        self._damaged: set[str] = set()  # found damaged while indexing: they are no rows, and have no place
        self._refusals: dict[int, Rejected] = {}
        self._next_step = self._entered = self._samples = self._epochs = self._placed = 0
        for item in quarantined:
            if item.sample_id is None:
                self._damaged.add(item.name)
            else:
                self._refusals[item.sample_id] = item

    def enter(self, entry: LedgerEntry, refs: Callable[[int], Sequence[SampleRef]]) -> None:
        """Check the next entry of the ledger."""
        step = entry.step
        if step < self._next_step:
            self._find(Rule.STEPS, step, f"step {step} comes again behind step {self._next_step - 1}")
            return
        if step >= self._num_steps:
            self._find(Rule.STEPS, step, f"step {step} is in the ledger, but only {self._num_steps:,} steps are committed")
            return
        self._miss(step)
        for lost in range(self._next_step, step):
            self._complete(lost, self._walk(lost, refs(lost)))
        self._next_step, self._entered = step + 1, self._entered + 1
        of_step = refs(step)
        due = self._walk(step, of_step)
        found = self._take(step, entry.samples)
        for number in sorted(due.keys() | found.keys()):
            if due[number] != found[number]:
                self._find(Rule.PLACES, step, self._difference(step, number, due[number], found[number]))
        if self._name_of is not None:
            self._compare(step, of_step, entry.samples)
        self._complete(step, due)

    def close(self) -> list[Check]:
        """Finish the audit after the last entry, and return its checks."""
        self._miss(self._num_steps)
        steps, samples = f"{self._entered:,} of {self._num_steps:,} steps", f"{self._samples:,} samples"
        named = ", compared name by name" if self._name_of is not None else ""
        epochs = max((shard.begun + 1 for shard in self._shards), default=0)
        self.checks[Rule.STEPS].compared = f"{steps}, each once and in order"
        self.checks[Rule.PLACES].compared = f"{samples} of {self._entered:,} steps, each in its step{named}"
        self.checks[Rule.ONCE].compared = f"{samples} of {epochs:,} epoch{'s' * (epochs != 1)}, each once in an epoch"
        self.checks[Rule.WHOLE].compared = f"{self._epochs:,} complete epochs of {len(self._shards):,} shards, every row in each"
        entries = f"{len(self._damaged):,} damaged entr{'y' if len(self._damaged) == 1 else 'ies'}"
        quarantined = f"{self._placed:,} sample{'s' * (self._placed != 1)} and {entries}"
        self.checks[Rule.QUARANTINE].compared = f"{quarantined}, none consumed from then on"
        return list(self.checks.values())

    def _walk(self, step: int, refs: Sequence[SampleRef]) -> Counter[int]:
        """Walk over the places of a step; return how many samples of each shard it must consume, which may be 0."""
        for ref in refs:
            if ref.sample_id in self._refusals:
                self._refuse(step, ref, self._refusals.pop(ref.sample_id))
        due: Counter[int] = Counter()
        for ref in refs:
            shard = self._shards[ref.shard]
            shard.places += 1
            due[ref.shard] += ref.row not in shard.refused_rows
        return due

    def _refuse(self, step: int, ref: SampleRef, item: Rejected) -> None:
        """Quarantine the row of a refused sample from this step on, at all places that the row has in the step."""
        shard, found = self._shards[ref.shard], split_name(item.name, self._numbers)
        if found is None or found[0] != ref.shard or item.row not in (None, ref.row):
            sentence = f"{item.name} is quarantined as sample #{ref.sample_id}, which is row {ref.row} of {shard.name}"
            self._find(Rule.QUARANTINE, step, sentence, item.name)
            return
        self._placed += 1
        shard.refused_rows.add(ref.row)
        shard.refused[item.name] = step

    def _take(self, step: int, names: Iterable[str]) -> Counter[int]:
        """Enter the names of a step; return how many of each shard break no rule by themselves."""
        counts: Counter[int] = Counter()
        for name in names:
            self._samples += 1
            place = split_name(name, self._numbers)
            if place is None or not place[1]:
                self._find(Rule.PLACES, step, f"step {step} has {name}, which is in no shard of the manifest", name)
                continue
            shard = self._shards[place[0]]
            if name in self._damaged or name in shard.refused:
                since = f"in step {shard.refused[name]}" if name in shard.refused else "when its shard was indexed"
                self._find(Rule.QUARANTINE, step, f"step {step} has {name}, which was quarantined {since}", name)
            elif (last := shard.enter(name, step)) is not None:
                sentence = f"step {step} has {name}, which step {last} has in the same epoch" + (" already" * (last < step))
                self._find(Rule.ONCE, step, sentence, name)
            else:
                counts[place[0]] += 1
        return counts

    def _compare(self, step: int, refs: Sequence[SampleRef], names: Iterable[str]) -> None:
        """Compare the names of a step with the names in the rows that the order puts there."""
        assert self._name_of is not None
        due = Counter(self._name_of(ref) for ref in refs if ref.row not in self._shards[ref.shard].refused_rows)
        found = Counter(names)
        for name in sorted((found - due).keys()):
            self._find(Rule.PLACES, step, f"step {step} has {name}, which the order puts elsewhere", name)
        for name in sorted((due - found).keys()):
            self._find(Rule.PLACES, step, f"step {step} lacks {name}, which the order puts there", name)

    def _complete(self, step: int, touched: Iterable[int]) -> None:
        for shard in (self._shards[number] for number in touched):
            for epoch, consumed, whole in shard.complete():
                self._epochs += 1
                if not whole:
                    sentence = (
                        f"epoch {epoch} of {shard.name} ended with step {step}: {consumed:,} consumed and "
                        f"{len(shard.refused):,} quarantined samples are not its {shard.num_rows:,} rows"
                    )
                    self._find(Rule.WHOLE, step, sentence)

    def _miss(self, step: int) -> None:
        """Report the steps that are missing between the last entry and this step."""
        if (first := self._next_step) < step:
            which = f"step {first} is" if first == step - 1 else f"steps {first} to {step - 1} are"
            self._find(Rule.STEPS, first, f"{which} not in the ledger")

    def _difference(self, step: int, number: int, due: int, found: int) -> str:
        more = f"{found - due} too many" if found > due else f"{due - found} missing"
        return f"step {step} has {found} samples of {self._shards[number].name}, and the order puts {due} there: {more}"

    def _find(self, rule: Rule, step: int, sentence: str, sample: str = "") -> None:
        self.checks[rule].add(Finding(step=step, sentence=sentence, sample=sample))
