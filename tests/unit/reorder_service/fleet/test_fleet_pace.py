"""The fleet follows what its members do: leases fit their pace, and what one is late with is done by another."""

from __future__ import annotations

import pytest

from headrace.reorder_service.fleet.lateness import LATE, LEAST_LATE_S, START_S
from headrace.reorder_service.fleet.member import Member, heartbeat_s
from headrace.reorder_service.fleet.pace import FIRST_SAMPLES, LEASE_S, LEAST_SAMPLES, MOST_SAMPLES, Pace
from tests.unit.reorder_service.fleet.fleet_world import Bench, report, work_at


def num_samples(member: Member) -> list[int]:
    return [work.num_samples for work in member.leases.values()]


def overdue_by(bench: Bench, seconds: float) -> None:
    """Let so much time pass, looking now and then, as the service does."""
    for _ in range(10):
        bench.now_s += seconds / 10
        bench.beat()
        bench.fleet.look()


def test_a_member_without_a_heartbeat_is_gone_in_seconds() -> None:
    bench = Bench()
    silent = bench.join("silent")
    bench.submit("part")
    bench.join("other")
    overdue_by(bench, silent.silence_s)
    assert set(bench.fleet.members) == {"silent", "other"}
    bench.now_s += silent.silence_s
    bench.fleet.hear(bench.fleet.members["other"])
    bench.now_s += 0.1
    bench.fleet.look()
    assert set(bench.fleet.members) == {"other"}
    assert not silent.leases
    assert bench.placed["part"][-1][1] == "other:1"


# -- pace -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_a_time", [1, 4])
def test_the_rate_is_that_of_the_member_however_many_leases_it_has_at_a_time(at_a_time: int) -> None:
    pace = Pace()
    now_s = 0.0
    for _ in range(20):
        for _ in range(at_a_time):
            pace.begin(now_s)
        now_s += 0.1 * at_a_time
        for _ in range(at_a_time):  # all at once, as threads that began together do
            pace.report(now_s, 10)
            pace.end()
        now_s += 7.0  # idle
    assert pace.rate(now_s) == pytest.approx(100, rel=0.35)
    assert pace.gap_s == pytest.approx(0.1 * at_a_time)


def test_silence_counts_against_a_member_that_has_work_and_not_against_one_that_idles() -> None:
    pace = Pace()
    for now_s in (0.0, 1.0):
        pace.begin(now_s)
        pace.report(now_s + 0.1, 10)
        pace.end()
    assert pace.rate(99.0) == pytest.approx(100)
    pace.begin(99.0)
    assert pace.rate(99.1) == pytest.approx(100), "as long as usual"
    assert (pace.rate(100.0) or 0) < 50


def test_time_that_a_full_store_takes_says_nothing() -> None:
    pace = Pace()
    for begun_s, now_s, held_up in [(0.0, 0.1, False), (0.2, 0.3, False), (0.3, 60.0, True), (60.0, 60.1, False)]:
        pace.begin(begun_s)
        pace.report(now_s, 10, held_up=held_up)
        pace.end()
    assert pace.rate(60.1) == pytest.approx(100)


def test_neither_a_slow_start_nor_a_mishap_makes_long_silences_usual() -> None:
    pace = Pace()
    now_s = 0.0
    for passed_s in [5.0, *[0.1] * 9, 60.0, *[0.1] * 9]:
        pace.begin(now_s)
        now_s += passed_s
        pace.report(now_s, 10)
        pace.end()
    assert pace.gap_s == pytest.approx(0.1, abs=0.1)


# -- leases that fit --------------------------------------------------------------------------------------------------


def test_work_is_cut_when_it_is_placed_to_what_the_member_does_in_the_time_of_a_lease() -> None:
    bench = Bench()
    fast, slow = bench.join("fast", 1), bench.join("slow", 1)
    work_at(bench, fast, keep=False, samples=50, seconds=50 / 4000)
    work_at(bench, slow, keep=False, samples=50, seconds=50 / 400)
    bench.fleet.submit(bench.divisible("step", 10_000))
    assert num_samples(fast) == [pytest.approx(4000 * LEASE_S, abs=2)]
    assert num_samples(slow) == [pytest.approx(400 * LEASE_S, abs=2)]


@pytest.mark.parametrize(("seconds", "samples"), [(1e-4, MOST_SAMPLES), (60.0, LEAST_SAMPLES)])
def test_a_lease_has_a_least_and_a_most(seconds: float, samples: int) -> None:
    bench = Bench()
    member = bench.join("p", 1)
    work_at(bench, member, keep=False, samples=64, seconds=seconds, times=4)
    bench.fleet.submit(bench.divisible("step", 10_000))
    assert num_samples(member) == [samples]


def test_the_pieces_are_the_whole_in_order_and_each_once() -> None:
    bench = Bench()
    member = bench.join("p", 2)
    bench.fleet.submit(bench.divisible("late", 100, priority=2))
    bench.fleet.submit(bench.divisible("soon", 2 * FIRST_SAMPLES + 6, priority=1))
    while member.leases:
        report(bench, member)
    assert bench.done == [f"late[0:{FIRST_SAMPLES}]", f"late[{FIRST_SAMPLES}:100]", "soon[0:64]", "soon[64:128]", "soon[128:134]"]


def test_a_member_that_is_slower_than_the_others_takes_fewer_parts_at_a_time() -> None:
    bench = Bench()
    members = {name: bench.join(name, 12) for name in ("a", "b", "slow")}
    for name, member in members.items():
        work_at(bench, member, keep=True, samples=16, seconds=0.4 if name == "slow" else 0.1)
    bench.beat()
    bench.fleet.look()
    for n in range(99):
        bench.submit(f"part{n}", keep=True, shards={0: 16})
    assert {name: len(member.leases) for name, member in members.items()} == {"a": 12, "b": 12, "slow": 4}
    for _ in range(60):  # it is as fast as the others now
        bench.now_s += 0.1
        report(bench, members["slow"])
    bench.beat()
    bench.fleet.look()
    assert len(members["slow"].leases) == 12


# -- what is late -----------------------------------------------------------------------------------------------------


def probing(bench: Bench) -> tuple[Member, Member]:
    """Two members, of which the first has a lease of 50 samples of the step and the other idles."""
    hangs, helps = bench.join("hangs", 2), bench.join("helps", 2)
    for member in (hangs, helps):
        work_at(bench, member, keep=False, samples=50, seconds=0.05)
    work = bench.divisible("step", 50)
    work.avoid = {"helps"}
    bench.fleet.submit(work)
    work_in_hand = next(iter(hangs.leases.values()))
    work_in_hand.avoid = set()
    return hangs, helps


def test_a_lease_is_late_after_some_times_the_usual_silence_and_then_done_by_who_idles() -> None:
    bench = Bench()
    hangs, helps = probing(bench)
    overdue_by(bench, 0.9 * LEAST_LATE_S)
    assert not helps.leases
    overdue_by(bench, 0.3 * LEAST_LATE_S)
    assert bench.sent["helps"][-1] == "step[0:50]"
    assert (len(hangs.leases), len(hangs.overdue)) == (0, 1)
    before = len(bench.done)
    report(bench, helps)
    report(bench, hangs, next(iter(hangs.overdue)))
    assert bench.done[before:] == ["step[0:50]"] * 2, "who takes the results of pieces knows which it has"


def test_the_first_of_two_answers_counts_and_the_second_does_not() -> None:
    """A part has one place: where it was ready first."""
    for first in ("hangs", "helps"):
        bench = Bench()
        members = {name: bench.join(name, 2) for name in ("helps", "hangs")}
        for member in members.values():
            work_at(bench, member, keep=True, samples=16, seconds=0.05)
        work = bench.work("part", keep=True, urgent=lambda: True, shards={0: 16})
        work.avoid = {"helps"}
        bench.fleet.submit(work)
        work.avoid = set()
        overdue_by(bench, 2 * LEAST_LATE_S)
        assert [endpoint for _, endpoint in bench.placed["part"]] == ["hangs:1", "helps:1"]
        leases = {"hangs": bench.placed["part"][0][0], "helps": bench.placed["part"][1][0]}
        bench.done.clear()
        for name in sorted(members, key=lambda name: name != first):
            report(bench, members[name], leases[name])
        assert bench.done == ["part"]
        assert [list(member.kept) for name, member in members.items() if name == first] == [[leases[first]]]
        assert bench.placed["part"][-1] == (leases[first], f"{first}:1")
        assert all(member.taken == {False: 0, True: 0} for member in members.values())


def test_a_late_answer_to_what_has_failed_meanwhile_does_not_count() -> None:
    """Whose it was tries again, and would have it twice."""
    bench = Bench()
    hangs, helps = bench.join("hangs", 2), bench.join("helps", 2)
    for member in (hangs, helps):
        work_at(bench, member, keep=True, samples=16, seconds=0.05)
    part = bench.work("part", keep=True, urgent=lambda: True, shards={0: 16})
    part.avoid = {"helps"}
    bench.fleet.submit(part)
    part.avoid = set()
    overdue_by(bench, 2 * LEAST_LATE_S)
    bench.fleet.fail(helps, bench.placed["part"][1][0], "no memory")
    assert bench.failed == [("part", "no memory")]
    report(bench, hangs, bench.placed["part"][0][0])
    assert "part" not in bench.done
    assert not hangs.kept


def test_a_large_lease_of_a_fast_member_is_split_among_those_who_idle() -> None:
    bench = Bench()
    fast = bench.join("fast", 1)
    work_at(bench, fast, keep=False, samples=50, seconds=0.005)
    bench.fleet.submit(bench.divisible("step", 400))
    assert num_samples(fast) == [400]
    others = [bench.join(name, 1) for name in ("a", "b", "c")]
    for member in others:
        work_at(bench, member, keep=False, samples=50, seconds=0.02)
    overdue_by(bench, 2 * LEAST_LATE_S)
    assert [num_samples(member) for member in others] == [[125]] * 3


def test_a_probe_is_not_done_twice_while_other_work_waits() -> None:
    bench = Bench()
    hangs, helps = probing(bench)
    for n in range(9):
        bench.submit(f"index{n}")
    overdue_by(bench, 1.0)
    assert len(hangs.leases) > 0
    assert not hangs.overdue
    assert not any(work.cut for work in helps.leases.values())


def test_a_part_that_no_trainer_waits_for_is_not_late() -> None:
    bench = Bench()
    needed: set[str] = set()
    hangs, helps = bench.join("p", 2), bench.join("q", 2)
    for member in (hangs, helps):
        work_at(bench, member, keep=True, samples=16, seconds=0.05)
    work = bench.work("part", keep=True, urgent=lambda: "part" in needed, shards={0: 16})
    work.avoid = {"q"}
    bench.fleet.submit(work)
    overdue_by(bench, 60.0)
    assert len(bench.placed["part"]) == 1
    needed.add("part")
    bench.fleet.look()
    assert len(bench.placed["part"]) == 1, "it may come at once now: it has not been waited for"
    overdue_by(bench, 2 * LEAST_LATE_S)
    assert len(bench.placed["part"]) == 1, "the only other one has failed at it"
    work.avoid.clear()
    overdue_by(bench, 2 * LEAST_LATE_S)
    assert bench.placed["part"][-1][1] == "q:1"


def test_a_silent_member_gets_nothing_more_until_it_reports() -> None:
    bench = Bench()
    hangs, helps = probing(bench)
    overdue_by(bench, 2 * LEAST_LATE_S)
    assert hangs.silent
    report(bench, helps)
    for n in range(3):
        bench.submit(f"index{n}")
    assert [endpoint for n in range(2) for _, endpoint in bench.placed[f"index{n}"]] == ["helps:1"] * 2
    assert "index2" not in bench.placed, "it waits for the other one's slot"
    report(bench, hangs, next(iter(hangs.overdue)))
    assert bench.placed["index2"][0][1] == "hangs:1"


def test_a_member_that_has_not_reported_yet_has_time_to_begin() -> None:
    bench = Bench()
    work_at(bench, bench.join("helps", 2), keep=False, samples=50, seconds=0.05)
    bench.join("starts", 4)
    bench.fleet.submit(bench.divisible("step", 50))
    overdue_by(bench, 0.9 * START_S)
    assert bench.sent["starts"][-1] == "step[0:50]"
    assert "step[0:50]" not in bench.sent["helps"]
    overdue_by(bench, 0.3 * START_S)
    assert bench.sent["helps"][-1] == "step[0:50]"


def test_where_all_are_silent_none_is() -> None:
    bench = Bench()
    member = bench.join("p", 2)
    work_at(bench, member, keep=False, samples=50, seconds=0.05)
    bench.fleet.submit(bench.divisible("step", 50))
    overdue_by(bench, 60.0)
    bench.submit("index")
    assert bench.placed["index"]


def test_a_member_that_is_slow_by_nature_has_longer_leases_than_most_before_it_is_late() -> None:
    """Late is who takes LATE times as long as usual among all, so that a lease of a slow one is shared, too."""
    bench = Bench()
    members = [bench.join(name, 1) for name in ("a", "b", "slow")]
    for member, seconds in zip(members, (0.2, 0.2, 0.6), strict=True):
        work_at(bench, member, keep=True, samples=16, seconds=seconds)
    part = bench.work("part", keep=True, urgent=lambda: True, shards={0: 16})
    part.avoid = {"a", "b"}
    bench.fleet.submit(part)
    part.avoid = set()
    overdue_by(bench, 0.9 * LATE * 0.2)
    assert len(bench.placed["part"]) == 1
    overdue_by(bench, 0.3 * LATE * 0.2)
    assert len(bench.placed["part"]) == 2


def test_a_member_that_is_to_pause_longer_between_heartbeats_is_gone_later() -> None:
    bench = Bench()
    bench.join("often")
    bench.join("rarely").heartbeat_s = 4.0
    bench.now_s += 11.9
    bench.fleet.look()
    assert set(bench.fleet.members) == {"rarely"}
    bench.now_s += 0.2
    bench.fleet.look()
    assert not bench.fleet.members


def test_a_large_fleet_pauses_longer_between_heartbeats() -> None:
    assert [heartbeat_s(num_members) for num_members in (0, 100, 500, 2_000)] == [1.0, 1.0, 1.0, 4.0]
