"""The fleet: work goes to whoever is free, and comes back from whoever leaves."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.observability import metrics
from headrace.reorder_service.fleet.member import MOST_REMEMBERED, REMEMBERED_SHARDS, Work
from tests.examples import with_examples
from tests.unit.reorder_service.fleet.fleet_world import Bench, finish


def placed(shard: str) -> float:
    """The metric of samples in shards that are near, or new, to who took them."""
    return metrics.REORDER.get_sample_value("headrace_reorder_samples_placed_total", {"shard": shard}) or 0.0


def test_a_job_is_introduced_before_its_first_work_and_once() -> None:
    bench = Bench()
    bench.join("p", slots=3)
    bench.submit("a")
    bench.submit("b")
    bench.submit("c", job="other")
    assert bench.sent["p"] == ["open job", "a", "b", "open other", "c"]


def test_work_waits_for_a_free_slot_and_the_lower_priority_goes_first() -> None:
    bench = Bench()
    for name, priority in [("late", 2), ("soon", 1), ("now", 0)]:
        bench.submit(name, priority)
    member = bench.join("p")
    assert bench.sent["p"] == ["open job", "now"]
    finish(bench, member, next(iter(member.leases.values())))
    assert bench.sent["p"][-1] == "soon"


@pytest.mark.parametrize(("other_slots", "others"), [(0, 2), (3, 3)])
def test_decoding_and_other_work_have_slots_of_their_own(other_slots: int, others: int) -> None:
    """A member of an older release says only how many it has for decoding."""
    bench = Bench()
    bench.join("p", slots=2, other_slots=other_slots)
    for n in range(4):
        bench.submit(f"index{n}")
        bench.submit(f"decode{n}", keep=True)
    sent = bench.sent["p"]
    assert [sum(name.startswith(kind) for name in sent) for kind in ("decode", "index")] == [2, others]


def test_the_member_with_most_free_slots_gets_the_work() -> None:
    bench = Bench()
    bench.join("small", slots=1)
    bench.join("large", slots=3)
    for n in range(4):
        bench.submit(f"w{n}")
    assert len(bench.sent["large"]) == 1 + 3
    assert len(bench.sent["small"]) == 1 + 1


def test_work_goes_to_who_has_read_its_shards() -> None:
    bench = Bench()
    before = [placed(shard) for shard in ("near", "new")]
    members = {name: bench.join(name, slots=4) for name in "pq"}
    firsts = [bench.submit(f"first{n}", shards={n: 1}) for n in range(2)]  # the second one to p, which has more free slots
    for name, first in zip("qp", firsts, strict=True):
        finish(bench, members[name], first)
    for n in range(4):
        bench.submit(f"again{n}", shards={n % 2: 3, 7 + n: 1})
    assert {name: [work for work in sent if work.startswith("again")] for name, sent in bench.sent.items()} == {
        "q": ["again0", "again2"],
        "p": ["again1", "again3"],
    }
    assert [placed(shard) - old for shard, old in zip(("near", "new"), before, strict=True)] == [12, 6]


def test_shards_read_before_do_not_make_a_queue_where_another_member_idles() -> None:
    bench = Bench()
    bench.join("busy", slots=4)
    for n in range(4):
        if n == 2:
            bench.join("idle", slots=4)
        bench.submit(f"w{n}", shards={0: 1})
    assert [endpoint for n in range(4) for _, endpoint in bench.placed[f"w{n}"]] == 2 * ["busy:1"] + 2 * ["idle:1"]


def test_equals_take_turns() -> None:
    bench = Bench()
    members = {f"{name}:1": bench.join(name) for name in "pqr"}
    takers = []
    for n in range(6):
        work = bench.submit(f"w{n}")
        takers.append(bench.placed[f"w{n}"][0][1])
        finish(bench, members[takers[-1]], work)
    assert takers[:3] == takers[3:]
    assert len(set(takers)) == 3


def test_samples_are_decoded_by_who_has_probed_them() -> None:
    bench = Bench()
    for name in "pq":
        bench.join(name, slots=4)
    for n, name in enumerate("ppqq"):
        bench.submit(f"w{n}", keep=True, shards={0: 4}, probed_by={name: 3, "gone": 1})
    assert [bench.placed[f"w{n}"][0][1] for n in range(4)] == ["p:1", "p:1", "q:1", "q:1"]


def test_a_member_that_alone_has_a_free_slot_takes_what_is_nearest_to_it_of_what_comes_next() -> None:
    bench = Bench()
    p, q = bench.join("p"), bench.join("q")
    busy = [bench.submit(f"busy{n}", keep=True) for n in range(2)]
    for n, name in enumerate("ppqpp"):
        bench.submit(f"w{n}", 1 + n, keep=True, shards={0: 4}, probed_by={name: 4})
    for member, work in ((member, work) for member in (q, p) for work in busy if work.lease in member.leases):
        finish(bench, member, work)
    assert bench.placed["w2"][0][1] == "q:1"
    assert bench.placed["w0"][0][1] == "p:1", "of what is equally near, the first"
    finish(bench, q, next(iter(q.leases.values())))
    assert bench.placed["w1"][0][1] == "q:1", "nobody idles for nearness"


def test_only_the_latest_shards_count() -> None:
    bench = Bench()
    p = bench.join("p", slots=9)
    bench.submit("many", shards=dict.fromkeys(range(REMEMBERED_SHARDS[1] + 1), 1))
    assert len(p.shards) == REMEMBERED_SHARDS[1]
    assert p.num_near(bench.work("old", shards={0: 1})) == 0
    assert p.num_near(bench.work("half", shards={0: 1, 1: 1})) == 1


def test_members_share_the_memory_for_shards() -> None:
    bench = Bench()
    members = [bench.join(f"m{n}", slots=1) for n in range(128)]
    bench.submit("many", shards=dict.fromkeys(range(REMEMBERED_SHARDS[1]), 1))
    assert sum(len(member.shards) for member in members) == MOST_REMEMBERED // 128


def test_a_member_that_hangs_on_its_work_gets_no_more_than_its_slots() -> None:
    """What a trainer waits for too long is done by another; the first one's slots stay taken until it answers."""
    bench = Bench()
    hangs = bench.join("hangs", slots=2)
    parts = [bench.submit(f"part{n}", n, keep=True) for n in range(2)]
    bench.join("helps", slots=2)
    leases = [str(part.lease) for part in parts]
    for lease in leases:
        bench.fleet.lost(lease)
    bench.submit("next", 9, keep=True)
    assert [bench.placed[name][-1][1] for name in ("part0", "part1")] == ["helps:1"] * 2
    assert "next" not in bench.placed
    bench.fleet.finish(hangs, leases[0], None)
    assert bench.placed["next"][-1][1] == "hangs:1"
    assert bench.done == [], "the late answer is nobody's"
    bench.fleet.release(parts)
    assert hangs.free(keep=True) == 1


def test_urgent_work_is_placed_without_a_free_slot() -> None:
    bench = Bench()
    bench.join("p")
    bench.submit("a")
    bench.submit("b", urgent=lambda: True)
    assert bench.sent["p"] == ["open job", "a", "b"]


def test_urgent_work_does_not_go_to_the_first_of_many_members_that_come_at_once() -> None:
    bench = Bench(settle_s=2.0)
    bench.join("a", slots=2)
    for name in "1234567":
        bench.submit(name, int(name), keep=True, urgent=lambda: True)
    assert bench.sent["a"] == ["open job", "1", "2", "3", "4"]
    bench.join("b")
    assert bench.sent["b"] == ["open job", "5", "6"]
    bench.now_s += 2.0
    bench.beat()
    bench.fleet.look()
    assert [len(member.leases) for member in bench.fleet.members.values()] == [4, 3]


def test_a_lot_is_one_lease_until_it_fails_and_then_its_parts_are_placed_by_themselves() -> None:
    bench = Bench()
    one = bench.join("one", slots=2)
    lot = bench.lot("a", "b")
    bench.fleet.submit(lot)
    assert bench.sent["one"] == ["open job", "a+b"]
    assert lot.lease is not None
    bench.fleet.fail(one, lot.lease, "no memory")
    assert bench.sent["one"] == ["open job", "a+b", "a", "b"]
    assert (lot.lease, bench.failed) == (None, [])
    for lease in list(one.leases):
        bench.fleet.finish(one, lease, "result")
    assert bench.done == ["a", "b"]


def test_a_lot_whose_member_leaves_is_placed_again_as_a_whole() -> None:
    bench = Bench()
    one = bench.join("one")
    lot = bench.lot("a", "b")
    bench.fleet.submit(lot)
    bench.join("two")
    finish(bench, one, lot)
    bench.fleet.leave(one, "departed")
    assert bench.sent["two"] == ["open job", "a+b"]


def test_a_member_that_takes_no_lots_gets_the_parts_by_themselves() -> None:
    bench = Bench()
    old = bench.join("old", slots=2, takes_lots=False)
    bench.fleet.submit(bench.lot("a", "b", "c"))
    assert bench.sent["old"] == ["open job", "a", "b"]
    bench.fleet.finish(old, next(iter(old.leases)), "result")
    assert bench.sent["old"][-1] == "c"


def test_a_late_answer_to_a_lot_that_was_broken_up_meanwhile_is_ignored() -> None:
    bench = Bench()
    one = bench.join("one")
    lot = bench.lot("a", "b", urgent=lambda: True)
    bench.fleet.submit(lot)
    two, first = bench.join("two"), lot.lease
    assert first is not None
    bench.fleet.lost(first)
    assert lot.lease is not None
    bench.fleet.fail(two, lot.lease, "cannot")
    bench.fleet.finish(one, first, "result")
    assert bench.done == []
    assert {order for orders in bench.sent.values() for order in orders} >= {"a", "b"}


def test_waiting_work_of_one_job_does_not_hold_up_urgent_work_of_another() -> None:
    """Slots that an idle job holds for ever must not stop a job whose trainers wait."""
    bench = Bench()
    bench.join("p")
    for n in range(3):
        bench.submit(f"idle{n}", 0, job="idle")
    bench.submit("needed", 9, job="busy", urgent=lambda: True)
    assert bench.sent["p"] == ["open idle", "idle0", "open busy", "needed"]


def test_work_that_becomes_urgent_is_placed_at_the_next_release() -> None:
    bench = Bench()
    waited_for: set[str] = set()
    bench.join("p")
    first = bench.submit("first", 0)
    bench.submit("second", 1)
    bench.submit("third", 2, urgent=lambda: "third" in waited_for)
    waited_for.add("third")
    bench.fleet.release([bench.work("nothing")])
    assert bench.sent["p"] == ["open job", "first", "third"]
    bench.fleet.release([first])
    assert "second" not in bench.sent["p"], "the third still takes more than the member's one slot"


def test_a_lease_that_was_given_up_is_ignored() -> None:
    bench = Bench()
    p = bench.join("p")
    work = bench.submit("a")
    stale = work.lease
    bench.fleet.leave(p, "test")
    q = bench.join("q")
    assert stale is not None
    bench.fleet.finish(p, stale, None)
    bench.fleet.finish(q, stale, None)
    assert not bench.done
    finish(bench, q, work)
    assert bench.done == ["a"]


def test_a_member_that_comes_back_under_its_name_replaces_its_former_self() -> None:
    bench = Bench()
    former = bench.join("p")
    work = bench.submit("a")
    again = bench.join("p")
    assert bench.sent["p"] == ["open job", "a", "open job", "a"]
    bench.fleet.leave(former, "its stream ends late")
    assert bench.fleet.members == {"p": again}
    finish(bench, again, work)
    assert bench.done == ["a"]


def test_kept_parts_are_done_again_when_their_member_leaves_and_other_results_are_not() -> None:
    bench = Bench()
    p = bench.join("p", slots=2)
    part, probe = bench.submit("part", keep=True), bench.submit("probe")
    finish(bench, p, part)
    finish(bench, p, probe)
    bench.fleet.leave(p, "test")
    bench.join("q", slots=2)
    assert bench.sent["q"] == ["open job", "part"]
    assert [endpoint for _, endpoint in bench.placed["part"]] == ["p:1", "q:1"]


def test_a_released_part_is_not_done_again() -> None:
    bench = Bench()
    p = bench.join("p", slots=2)
    kept, leased = bench.submit("kept", keep=True), bench.submit("leased", keep=True)
    finish(bench, p, kept)
    bench.fleet.release([kept, leased])
    bench.fleet.leave(p, "test")
    bench.join("q", slots=9)
    assert not bench.sent["q"]


def test_lost_work_goes_to_another_member_and_to_the_same_one_only_if_it_is_alone() -> None:
    bench = Bench()
    bench.join("p", slots=9)
    part = bench.submit("part", keep=True)
    finish(bench, bench.fleet.members["p"], part)
    assert part.lease is not None
    bench.fleet.lost(part.lease)
    bench.join("q")
    assert [endpoint for _, endpoint in bench.placed["part"]] == ["p:1", "p:1"]
    bench.fleet.lost(part.lease)
    assert bench.placed["part"][-1][1] == "q:1"
    bench.fleet.lost("no such lease")
    assert len(bench.placed["part"]) == 3


def test_leases_are_new_each_time_and_in_each_life_of_the_service() -> None:
    leases = []
    for _ in range(2):
        bench = Bench()
        p = bench.join("p")
        work = bench.submit("a")
        bench.fleet.lost(str(work.lease))
        finish(bench, p, work)
        leases += [lease for lease, _ in bench.placed["a"]]
    assert len(set(leases)) == 4


def test_closing_a_job_drops_its_work_and_tells_who_knows_it() -> None:
    bench = Bench()
    p = bench.join("p", slots=1)
    bench.submit("a")
    bench.submit("b")
    bench.submit("c", 1, job="other")
    bench.fleet.close_job("job", "close job")
    assert bench.sent["p"] == ["open job", "a", "close job", "open other", "c"]
    bench.fleet.broadcast("job", "news")
    bench.fleet.broadcast("other", "news")
    assert bench.sent["p"][5:] == ["news"]
    assert p.jobs == {"other"}


class FleetMachine(RuleBasedStateMachine):
    """Random joins, leaves, results, delays and losses: no work is lost, none counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.works: dict[str, Work] = {}
        self.released: set[str] = set()
        self.keeps: set[str] = set()

    @rule(name=st.sampled_from("pqrs"), slots=st.integers(1, 3))
    def join(self, name: str, slots: int) -> None:
        self.bench.join(name, slots)

    @rule(priority=st.integers(0, 3), keep=st.booleans(), urgent=st.booleans())
    def submit(self, priority: int, keep: bool, urgent: bool) -> None:
        name = f"w{len(self.works)}"
        self.works[name] = self.bench.submit(name, priority, keep=keep, urgent=lambda: urgent)
        if keep:
            self.keeps.add(name)

    @precondition(lambda self: self.bench.fleet.members)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(list(self.bench.fleet.members.values())))
        self.bench.fleet.leave(member, "test")

    @precondition(lambda self: any(m.leases for m in self.bench.fleet.members.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        leases = [(member, lease) for member in self.bench.fleet.members.values() for lease in member.leases]
        member, lease = data.draw(st.sampled_from(leases))
        self.bench.fleet.finish(member, lease, None)

    @precondition(lambda self: any(m.overdue for m in self.bench.fleet.members.values()))
    @rule(data=st.data())
    def finish_late(self, data: st.DataObject) -> None:
        leases = [(member, lease) for member in self.bench.fleet.members.values() for lease in member.overdue]
        member, lease = data.draw(st.sampled_from(leases))
        self.bench.fleet.finish(member, lease, None)

    @rule(passed_s=st.sampled_from([0.01, 0.3, 5.0]))
    def look(self, passed_s: float) -> None:
        self.bench.now_s += passed_s
        self.bench.fleet.look()

    @precondition(lambda self: any(m.leases or m.kept for m in self.bench.fleet.members.values()))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        leases = [lease for member in self.bench.fleet.members.values() for lease in (*member.leases, *member.kept)]
        self.bench.fleet.lost(data.draw(st.sampled_from(leases)))

    @precondition(lambda self: self.works)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.works)))
        self.bench.fleet.release([self.works[name]])
        self.released.add(name)

    @invariant()
    def every_work_is_in_exactly_one_place(self) -> None:
        fleet = self.bench.fleet
        held = [work for member in fleet.members.values() for work in (*member.leases.values(), *member.kept.values())]
        waiting = [work for queue in fleet._waiting.queues.values() for work in queue]
        everywhere = [id(work) for work in (*held, *waiting)]
        assert len(everywhere) == len(set(everywhere))
        done = set(self.bench.done)
        expected = {
            id(w) for name, w in self.works.items() if name not in self.released and (name in self.keeps or name not in done)
        }
        assert set(everywhere) == expected

    @invariant()
    def what_does_not_stay_is_done_once(self) -> None:
        once = [name for name in self.bench.done if name not in self.keeps]
        assert len(once) == len(set(once))

    @invariant()
    def what_is_counted_is_there(self) -> None:
        fleet = self.bench.fleet
        for member in fleet.members.values():
            at_work = [*member.leases.values(), *member.overdue.values()]
            assert member.taken == {keep: sum(work.keep == keep for work in at_work) for keep in (False, True)}
            assert member.paces[True].num_open == member.taken[True]
        leases = {lease: m for m in fleet.members.values() for lease in (*m.leases, *m.kept, *m.overdue)}
        assert fleet._holders == leases
        waiting = {work for queue in fleet._waiting.queues.values() for work in queue}
        assert {work for works in fleet._waiting._by_urgency.values() for work in works} == waiting

    @invariant()
    def nobody_waits_while_everyone_is_free(self) -> None:
        fleet = self.bench.fleet
        for keep, waiting in fleet._waiting.queues.items():
            if waiting and fleet.members:
                assert any(member.free(keep=keep) <= 0 for member in fleet.members.values())
                assert not any(work.urgent() for work in waiting)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = with_examples(60, stateful_step_count=40)


def test_what_one_member_cannot_do_another_is_asked_for() -> None:
    """A preprocessor that lacks a mount must not empty the data set for all."""
    bench = Bench()
    blind, sighted = bench.join("blind", slots=2), bench.join("sighted", slots=1)
    work = bench.submit("work")
    assert work.lease in blind.leases
    bench.fleet.fail(blind, work.lease, "no such folder")
    assert work.lease in sighted.leases
    finish(bench, sighted, work)
    assert (bench.failed, bench.done) == ([], ["work"])


def test_work_that_nobody_can_do_is_told_once_and_frees_its_slot() -> None:
    bench = Bench()
    members = [bench.join(name) for name in "pq"]
    work = bench.submit("work")
    for _ in members:
        member = next(m for m in members if work.lease in m.leases)
        lease = work.lease
        bench.fleet.fail(member, lease, "no such data set")
        bench.fleet.fail(member, lease, "no such data set")
    assert bench.failed == [("work", "no such data set")]
    assert not any(member.leases for member in members)


def test_parts_that_fill_every_slot_do_not_hold_up_probes() -> None:
    bench = Bench()
    bench.join("p")
    bench.submit("part", 0, keep=True)
    bench.submit("next part", 1, keep=True)
    bench.submit("probe", 2)
    assert bench.sent["p"] == ["open job", "part", "probe"]
