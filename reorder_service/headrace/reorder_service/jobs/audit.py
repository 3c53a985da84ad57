"""Exactly once, proven from the ledger (design section 3, invariant 3): plain values in, findings out.

The ledger names the samples of every committed step. The global order says where each row of the data set has its places,
as a pure function of spec, manifest and mixture; the quarantine names the rows that are refused, and the place at which each
was refused first. Put side by side:

    steps        the committed steps are 0 .. n - 1, each once and in order
    places       every step has as many samples of each shard as the order puts there, less the quarantined ones
    once         no name comes twice in one epoch of its shard
    whole        in every complete epoch of a shard, the names consumed and the names quarantined are as many as its rows, and
                 they are the names of its first whole epoch
    quarantine   every quarantined name has a place of its shard, and is not consumed from that step on

Where all five hold, each complete epoch of a shard has each of its rows once, consumed or quarantined, and what has begun of
the next one repeats nothing and leaves out nothing but what is quarantined.

What this does not prove: the ledger has names and the order has rows, and only the shards themselves know which key stands in
which row. So two samples of one shard that changed places within an epoch are not seen, and neither is a key that is not in
the data set, if it stands in for another in the very first epoch; both are where a caller can name the rows (`name_of`).

Holds the names of one epoch of the shards that are under way, and the quarantine; not the ledger.
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

MAX_FINDINGS = 100  # kept of each rule; one lost step of a large job may show in every shard


class Rule(StrEnum):
    """What must hold; see the module's text."""

    STEPS = "steps"
    PLACES = "places"
    ONCE = "once"
    WHOLE = "whole"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, as one sentence. `sample` is "" where no single one is named."""

    step: int
    sentence: str
    sample: str = ""


@dataclass(slots=True, kw_only=True)
class Check:
    """How one rule fared: what was compared, and the first MAX_FINDINGS of `num_findings`."""

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
    """The checks in the order of Rule; all holds where none has a finding.

    num_steps: that are committed. refs: the samples of a step, by place. shards: name and rows of each, in manifest order.
    quarantined: those of later steps are left out. name_of: of a row, where the shards can be read: then every step's names are
    compared one by one.
    """
    books = _Books(num_steps, shards, quarantined, name_of)
    for entry in entries:
        books.enter(entry, refs)
    return books.close()


class _Shard:
    """What has come of one shard so far."""

    def __init__(self, name: str, num_rows: int) -> None:
        self.name = name
        self.num_rows = num_rows
        self.places = 0
        self.epoch = 0
        """The first one that is not complete."""
        self.seen: dict[int, dict[str, int]] = {}
        """Epoch -> name -> step, from `epoch` on."""
        self.refused_rows: set[int] = set()
        self.refused: dict[str, int] = {}
        """Name -> step."""
        self.names_hash: int | None = None
        """Of all names, once an epoch was whole."""

    @property
    def begun(self) -> int:
        """The last epoch that has a place; -1: none."""
        return (self.places - 1) // self.num_rows if self.places else -1

    def enter(self, name: str, step: int) -> int | None:
        """Count a name into the first epoch that lacks it. Where each that has begun has it already: the step that had it last.

        A step on the border of two epochs has names of both and does not tell them apart. All names that the old one still
        lacks must be among them, so those are its.
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
        """Close the epochs that have had all of their places: (epoch, names consumed, whether they and the refused are all)."""
        while self.places >= (self.epoch + 1) * self.num_rows:
            consumed = self.seen.pop(self.epoch, {})
            names = frozenset(consumed).union(self.refused)
            whole = len(names) == self.num_rows and self.names_hash in (None, hash(names))
            if whole:
                self.names_hash = hash(names)
            yield self.epoch, len(consumed), whole
            self.epoch += 1


class _Books:
    """The checks, and where the walk through the steps stands."""

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
        self._damaged: set[str] = set()  # found while indexing: no rows, so without a place
        self._refusals: dict[int, Rejected] = {}
        self._next_step = self._entered = self._samples = self._epochs = self._placed = 0
        for item in quarantined:
            if item.sample_id is None:
                self._damaged.add(item.name)
            else:
                self._refusals[item.sample_id] = item

    def enter(self, entry: LedgerEntry, refs: Callable[[int], Sequence[SampleRef]]) -> None:
        """Take one entry of the ledger."""
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
        """The checks, once there is no further entry."""
        self._miss(self._num_steps)
        steps, samples = f"{self._entered:,} of {self._num_steps:,} steps", f"{self._samples:,} samples"
        named = ", compared name by name" if self._name_of is not None else ""
        epochs = max((shard.begun + 1 for shard in self._shards), default=0)
        self.checks[Rule.STEPS].compared = f"{steps}, each once and in order"
        self.checks[Rule.PLACES].compared = f"{samples} of {self._entered:,} steps, each in its step{named}"
        self.checks[Rule.ONCE].compared = f"{samples} of {epochs:,} epoch{'s' * (epochs != 1)}, each once in an epoch"
        self.checks[Rule.WHOLE].compared = f"{self._epochs:,} complete epochs of {len(self._shards):,} shards, every row in each"
        self.checks[
            Rule.QUARANTINE
        ].compared = f"{self._placed:,} samples and {len(self._damaged):,} damaged entries, none consumed from then on"
        return list(self.checks.values())

    def _walk(self, step: int, refs: Sequence[SampleRef]) -> Counter[int]:
        """Go over the places of a step; how many samples of each of its shards are to be consumed there, be it none."""
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
        """From this step on, in which it may have several places, a row is quarantined."""
        shard, found = self._shards[ref.shard], split_name(item.name, self._numbers)
        if found is None or found[0] != ref.shard or item.row not in (None, ref.row):
            sentence = f"{item.name} is quarantined as sample #{ref.sample_id}, which is row {ref.row} of {shard.name}"
            self._find(Rule.QUARANTINE, step, sentence, item.name)
            return
        self._placed += 1
        shard.refused_rows.add(ref.row)
        shard.refused[item.name] = step

    def _take(self, step: int, names: Iterable[str]) -> Counter[int]:
        """Enter the names of a step; how many of each shard there are, less those that are wrong by themselves."""
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
        """Each name against what stands in its row."""
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
        """Say it where steps before this one are missing."""
        if (first := self._next_step) < step:
            which = f"step {first} is" if first == step - 1 else f"steps {first} to {step - 1} are"
            self._find(Rule.STEPS, first, f"{which} not in the ledger")

    def _difference(self, step: int, number: int, due: int, found: int) -> str:
        more = f"{found - due} too many" if found > due else f"{due - found} missing"
        return f"step {step} has {found} samples of {self._shards[number].name}, and the order puts {due} there: {more}"

    def _find(self, rule: Rule, step: int, sentence: str, sample: str = "") -> None:
        self.checks[rule].add(Finding(step=step, sentence=sentence, sample=sample))
