"""What a round has come to, and the table of all. Pure: knows no process."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from headrace.ledger import LedgerEntry
from tests.chaos.faults import NAMES, Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a ledger differs from that of an undisturbed run."""

    lost: tuple[str, ...] = ()
    """Samples, by name."""
    repeated: tuple[str, ...] = ()
    failed_steps: tuple[int, ...] = ()
    """Missing, of other samples, or not delivered once to the ranks that committed them."""

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.repeated or self.failed_steps)


Deliveries = Mapping[tuple[int, int], Sequence[int]]
"""(rank, step) -> ids of the samples that the rank had when it committed the step."""


def judge(expected: Sequence[LedgerEntry], found: Sequence[LedgerEntry], deliveries: Deliveries) -> Verdict:
    """Compare what was committed, and what the ranks had by then, with an undisturbed run. Its step s is of as many ids
    behind those of step s - 1 as it has samples, as where none is refused."""
    wanted, got = Counter(_names(expected)), Counter(_names(found))
    right = {entry.step: entry.samples for entry in expected}
    differing = {entry.step for entry in found if right.get(entry.step) != entry.samples}
    missing = right.keys() - {entry.step for entry in found}
    delivered: defaultdict[int, list[int]] = defaultdict(list)
    for (_, step), ids in deliveries.items():
        delivered[step] += ids
    wrong, begin = set(), 0
    for entry in expected:
        end = begin + len(entry.samples)
        if sorted(delivered[entry.step]) != list(range(begin, end)):
            wrong.add(entry.step)
        begin = end
    return Verdict(
        lost=tuple(sorted((wanted - got).elements())),
        repeated=tuple(sorted((got - wanted).elements())),
        failed_steps=tuple(sorted(differing | missing | wrong)),
    )


def _names(ledger: Iterable[LedgerEntry]) -> list[str]:
    return [name for entry in ledger for name in entry.samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A fault that has happened."""

    fault: Fault
    next_commit_s: float | None
    """From the fault until all ranks had committed the next step; None: none was left."""
    longest_s: float | None
    """The longest time without a commit from then on: what was on its way already may come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A round."""

    struck: tuple[Struck, ...]
    verdict: Verdict
    errors: tuple[str, ...] = ()
    """Of processes and of the harness; none in a good round."""

    @property
    def is_good(self) -> bool:
        return self.verdict.is_good and not self.errors


def strike(fault: Fault, struck_s: float, next_step: int, commits_s: Sequence[float]) -> Struck:
    """`next_step`: the first that the watched rank had not committed; `commits_s`: when all ranks had committed each step."""
    later = [at_s for at_s in commits_s[next_step:] if at_s > struck_s]
    pauses = [end - begin for begin, end in zip([struck_s, *later], later, strict=False)]
    return Struck(fault=fault, next_commit_s=pauses[0] if pauses else None, longest_s=max(pauses, default=None))


@dataclass(slots=True)
class _Row:
    times: int = 0
    next_commits_s: list[float] = field(default_factory=list)
    longest_s: float = 0.0
    lost: int = 0
    repeated: int = 0
    failed_steps: int = 0


def table(outcomes: Iterable[Outcome]) -> str:
    """A line for each kind of fault that has struck. What two faults did together counts for both."""
    rows: defaultdict[str, _Row] = defaultdict(_Row)
    for outcome in outcomes:
        for struck in outcome.struck:
            row = rows[struck.fault.name]
            row.times += 1
            if struck.next_commit_s is not None and struck.longest_s is not None:
                row.next_commits_s.append(struck.next_commit_s)
                row.longest_s = max(row.longest_s, struck.longest_s)
            row.lost += len(outcome.verdict.lost)
            row.repeated += len(outcome.verdict.repeated)
            row.failed_steps += len(outcome.verdict.failed_steps)
    lines = [f"{'':30}{'':>6}{'next commit, s':>18}{'longest':>10}{'':>6}{'':>9}{'failed':>8}"]
    lines += [f"{'fault':30}{'times':>6}{'median':>9}{'most':>9}{'pause, s':>10}{'lost':>6}{'repeated':>9}{'steps':>8}"]
    for name in filter(rows.__contains__, NAMES):
        row = rows[name]
        next_s = row.next_commits_s or [0.0]
        lines.append(
            f"{name:30}{row.times:6}{median(next_s):9.1f}{max(next_s):9.1f}{row.longest_s:10.1f}"
            f"{row.lost:6}{row.repeated:9}{row.failed_steps:8}"
        )
    return "\n".join(lines)
