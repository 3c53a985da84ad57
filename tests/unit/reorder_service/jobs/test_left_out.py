"""Which samples of a part are left out where preprocessors disagree about them: one fact, however often the part is decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from headrace.quarantine import Reason, Rejected
from headrace.reorder_service.fleet.fleet import Fleet
from headrace.reorder_service.fleet.member import Member
from headrace.reorder_service.jobs.part_decoding import Decoding
from headrace.reorder_service.jobs.planned_step import PlannedPart
from headrace.reorder_service.jobs.work_orders import Orders
from headrace.sample import SampleRef
from headrace.v1 import common_pb2
from tests.unit.reorder_service.job_world import until

SAMPLES = (0, 1, 2, 3)


class Shards:
    """What orders take along."""

    def message(self, number: int) -> common_pb2.Shard:
        return common_pb2.Shard(number=number)


class World:
    """A fleet, and one part of SAMPLES that ranks of a pipeline fetch. Copies that were decoded are written down."""

    def __init__(self, *, shared: bool = True) -> None:
        self.now_s = 0.0
        self.fleet = Fleet(lambda: self.now_s)
        self.members: dict[str, Member] = {}
        self.orders: list[tuple[str, str, frozenset[int]]] = []
        """Member, lease, and the samples that are left out; in order."""
        self.copies: list[tuple[str, tuple[int, ...]]] = []
        self.failed: list[str] = []
        self.part = PlannedPart(
            ticket="job/t.x",
            replica=0,
            microbatch=0,
            places=frozenset({("llm", 0)}),
            samples=tuple(SampleRef(sample_id=i, shard=0, row=i) for i in SAMPLES),
            shards={0: len(SAMPLES)},
        )
        self._orders = Orders("job", 1.0, self.fleet, Shards(), lambda: shared)  # type: ignore[arg-type]
        self._cannot: Mapping[str, Collection[int]] = {}

    def join(self, *names: str) -> None:
        def hear(name: str) -> Callable[[Any], None]:
            def take(order: Any) -> None:
                if order != "open":
                    body = order.decode_part
                    assert body.strict
                    self.orders.append((name, body.lease, frozenset(item.sample_id for item in body.left_out)))

            return take

        for name in names:
            member = Member(
                name=name, endpoint=f"{name}:1", slots=2, send=hear(name), introduce=lambda _: "open", dismiss=lambda: None
            )
            self.members[name] = member
            self.fleet.join(member)

    def decode(self) -> None:
        on_failed = self.failed.append
        decoding = Decoding(
            self._orders, 0, on_placed=lambda _: None, on_failed=on_failed, urgent=lambda: True, wanted=lambda: True
        )
        decoding.submit([self.part])

    def answer(self, cannot: Mapping[str, Collection[int]], place: int = 0) -> str:
        """The member that has that order answers it. `cannot`: member -> samples that it cannot decode."""
        name, lease, left_out = self.orders.pop(place)
        damaged = [refused(i) for i in cannot.get(name, ()) if i not in left_out]
        if damaged:
            self.fleet.fail(self.members[name], lease, f"{name} cannot", damaged)
        else:
            self.copies.append((name, tuple(i for i in SAMPLES if i not in left_out)))
            self.fleet.finish(self.members[name], lease, None)
        return name


def refused(sample: int) -> Rejected:
    return Rejected(name=f"s/a/{sample}", reason=Reason.UNSUPPORTED_MEDIA, detail="no codec", sample_id=sample, row=sample)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.reorder_service.jobs.part_decoding.RETRY_PAUSES_S", (0.0, 0.0))


@pytest.mark.parametrize("first", ["poor", "rich"])
async def test_what_one_can_decode_is_left_out_nowhere(first: str) -> None:
    world = World()
    world.join("poor", "rich")
    world.part.probed_by = {first: 4}
    world.decode()
    cannot = {"poor": [2]}
    while not world.copies:
        world.answer(cannot)
    assert world.copies == [("rich", SAMPLES)]
    assert not world.part.agreed.left_out


async def test_what_nobody_can_decode_is_left_out_everywhere_from_then_on() -> None:
    world = World()
    world.join("p", "q")
    world.decode()
    cannot = {"p": [1, 2], "q": [2]}
    while not world.copies:
        world.answer(cannot)
    assert world.copies == [("q", (0, 1, 3))], "the fewest samples that somebody can do without"
    world.fleet.lost(world.part.lease)
    world.orders.clear()
    world.join("able")
    world.fleet.leave(world.members["p"], "departed")
    world.answer({})
    assert world.copies[1] == ("able", (0, 1, 3)), "one who could decode it all has to leave it out too"


async def test_no_more_than_three_are_asked() -> None:
    world = World()
    names = ["p", "q", "r", "s", "t"]
    world.join(*names)
    world.decode()
    asked = [world.answer({name: [0] for name in names}) for _ in range(3)]
    assert len(set(asked)) == 3
    world.answer({name: [0] for name in names})
    assert world.copies[0][1] == (1, 2, 3)


async def test_a_part_that_ranks_may_have_is_not_changed_and_the_job_ends_with_a_sentence_where_one_misses_it(
    no_pauses: None,
) -> None:
    world = World()
    world.join("rich")
    world.decode()
    world.answer({})
    world.fleet.leave(world.members["rich"], "killed")
    world.join("poor")
    for _ in range(9):
        await until(lambda: bool(world.orders))
        world.answer({"poor": [2]})
    assert not world.failed, "as long as all ranks that need it have it"
    world.part.agreed.is_missed = True  # as a rank's report does
    while not world.failed:
        if world.orders:
            world.answer({"poor": [2]})
        await asyncio.sleep(0)
    assert world.copies == [("rich", SAMPLES)]
    assert world.failed == [
        "preprocessor rich has decoded sample s/a/2, and poor cannot (unsupported_media: no codec): ranks of one pipeline "
        "would have different samples. Give all preprocessors the same codecs, and submit the job again"
    ]


async def test_where_each_part_has_one_reader_the_job_goes_on_without_the_sample(no_pauses: None) -> None:
    world = World(shared=False)
    world.join("rich")
    world.decode()
    world.answer({})
    world.fleet.leave(world.members["rich"], "killed")
    world.join("poor")
    while len(world.copies) == 1:
        if world.orders:
            world.answer({"poor": [2]})
        await asyncio.sleep(0)
    assert world.copies[1] == ("poor", (0, 1, 3))
    assert not world.failed


async def test_who_still_works_on_it_is_waited_for_before_a_sample_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have handed a whole copy out, and the word of that be on its way."""
    monkeypatch.setattr("headrace.reorder_service.jobs.part_decoding.RETRY_PAUSES_S", (0.0, 0.0, 3600.0))
    world = World()
    world.join("rich", "poor")
    world.part.probed_by = {"rich": 4}
    world.decode()
    work = world.part.work
    assert work is not None
    work.avoid.add("rich")
    world.fleet._mark_overdue(world.part.lease, counts=True)  # as `look` does with what is late
    world.fleet.submit(work)
    assert [name for name, *_ in world.orders] == ["rich", "poor"]
    world.answer({"poor": [2]}, place=1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert [name for name, *_ in world.orders] == ["rich"], "nothing is decided"
    world.answer({})
    assert world.copies == [("rich", SAMPLES)]
    assert not world.part.agreed.left_out
    assert world.part.endpoint == "rich:1"


async def test_claims_of_other_samples_than_the_part_has_are_ordinary_failures(no_pauses: None) -> None:
    world = World()
    world.join("liar")
    world.decode()
    for _ in range(3):
        await until(lambda: bool(world.orders))
        name, lease, _ = world.orders.pop()
        world.fleet.fail(world.members[name], lease, "cannot", [refused(99)])
    assert world.failed == ["cannot"]
