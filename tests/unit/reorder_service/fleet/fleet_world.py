"""A fleet of members that only write down what they are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.reorder_service.fleet.fleet import Fleet
from headrace.reorder_service.fleet.member import Member, Work


@dataclass(kw_only=True)
class Bench:
    """A fleet whose members write down what they are sent, and whose clock stands still unless it is set."""

    now_s: float = 0.0
    settle_s: float = 0.0
    fleet: Fleet = field(init=False)
    sent: dict[str, list[str]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    placed: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fleet = Fleet(lambda: self.now_s, self.settle_s)

    def beat(self) -> None:
        """A heartbeat of every member."""
        for member in self.fleet.members.values():
            self.fleet.hear(member)

    def join(self, name: str, slots: int = 1, *, other_slots: int = 0, takes_lots: bool = True) -> Member:
        orders = self.sent.setdefault(name, [])
        member = Member(
            name=name,
            endpoint=f"{name}:1",
            slots=slots,
            other_slots=other_slots,
            send=orders.append,
            introduce=lambda job: f"open {job}",
            dismiss=lambda: orders.append("dismissed"),
            takes_lots=takes_lots,
        )
        self.fleet.join(member)
        return member

    def work(
        self,
        name: str,
        priority: int = 0,
        *,
        job: str = "job",
        keep: bool = False,
        urgent: Callable[[], bool] = lambda: False,
        shards: dict[int, int] | None = None,
        probed_by: dict[str, int] | None = None,
    ) -> Work:
        return Work(
            job=job,
            priority=(priority,),
            order=lambda _lease: name,
            on_done=lambda _result, _member: self.done.append(name),
            on_failed=lambda error: self.failed.append((name, error)),
            on_placed=lambda lease, endpoint: self.placed.setdefault(name, []).append((lease, endpoint)),
            keep=keep,
            urgent=urgent,
            shards=shards or {},
            probed_by=probed_by or {},
        )

    def divisible(self, name: str, num_samples: int, priority: int = 0, begin: int = 0) -> Work:
        """Work of any size; pieces are called NAME[BEGIN:END]."""
        end = begin + num_samples
        work = self.work(f"{name}[{begin}:{end}]", priority, shards={0: num_samples})

        def cut(most: int) -> tuple[Work, Work | None]:
            first = min(most, num_samples)
            rest = self.divisible(name, num_samples - first, priority, begin + first) if first < num_samples else None
            return self.divisible(name, first, priority, begin), rest

        work.cut = cut
        return work

    def lot(self, *names: str, **options: object) -> Work:
        """Kept work that consists of others, by whose names it is called; submit it yourself."""
        work = self.work("+".join(names), keep=True, **options)  # type: ignore[arg-type]
        work.break_up = lambda: [self.work(name, keep=True, **options) for name in names]  # type: ignore[arg-type]
        return work

    def submit(self, name: str, priority: int = 0, **options: object) -> Work:
        work = self.work(name, priority, **options)  # type: ignore[arg-type]
        self.fleet.submit(work)
        return work


def finish(bench: Bench, member: Member, work: Work) -> None:
    assert work.lease is not None
    bench.fleet.finish(member, work.lease, "result")


def report(bench: Bench, member: Member, lease: str = "") -> None:
    """`member` reports a lease, by default its oldest."""
    bench.fleet.finish(member, lease or next(iter(member.leases)), "result")


def work_at(bench: Bench, member: Member, *, keep: bool, samples: int, seconds: float, times: int = 20) -> None:
    """Let a member, and nobody else, do so many works of so many samples, each in so many seconds."""
    others = {name for name in bench.fleet.members if name != member.name}
    for n in range(times):
        work = bench.divisible("warm", samples) if not keep else bench.work(f"warm{n}", keep=True, shards={0: samples})
        work.avoid = set(others)
        bench.fleet.submit(work)
        while member.leases:
            bench.now_s += seconds * next(iter(member.leases.values())).num_samples / samples
            report(bench, member)
    bench.fleet.release(list(member.kept.values()))
