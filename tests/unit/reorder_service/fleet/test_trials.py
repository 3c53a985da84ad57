"""Work that members die of: its samples are tried one by one, the one that kills is refused, and all else goes on."""

from __future__ import annotations

import pytest

from headrace.reorder_service.fleet.fleet import LOOK_S
from headrace.reorder_service.fleet.member import Member, Trial
from headrace.reorder_service.fleet.trials import GONE_S, MOST_DEATHS
from tests.unit.reorder_service.fleet.fleet_world import Bench, finish


class World:
    """A fleet, and a part of four samples of which some kill."""

    def __init__(self, *, deadly: tuple[int, ...] = (), num_members: int = 2) -> None:
        self.bench = Bench()
        self.deadly = deadly
        self.guilty: dict[int, int] = {}
        self.deaths = 0
        self._names = (f"p{n}" for n in range(1000))
        for _ in range(num_members):
            self.join()
        self.work = self.bench.work("part", keep=True)
        self.work.trials = lambda _work: [self._trial(n) for n in range(4) if n not in self.guilty]
        self.bench.fleet.submit(self.work)

    def join(self, name: str = "") -> Member:
        return self.bench.join(name or next(self._names))

    def _trial(self, sample: int) -> Trial:
        return Trial(self.bench.work(f"try {sample}"), lambda deaths: self.guilty.__setitem__(sample, deaths))

    def kills(self, order: str) -> bool:
        if order == "part":
            return bool(set(self.deadly) - self.guilty.keys())
        return order.startswith("try") and int(order.split()[1]) in self.deadly

    def turn(self) -> None:
        """Every member does what it has, or dies of it and is started again under another name."""
        for member in list(self.bench.fleet.members.values()):
            held = list(member.leases.items())
            orders = [work.order(lease) for lease, work in held]
            if any(map(self.kills, orders)):
                self.deaths += 1
                self.bench.fleet.leave(member, "connection closed", died=True)
                self.join()
                continue
            for _, work in held:
                finish(self.bench, member, work)
        self.pass_s(LOOK_S)

    def pass_s(self, seconds: float) -> None:
        self.bench.now_s += seconds
        self.bench.beat()
        self.bench.fleet.look()

    def run(self, most_turns: int = 500) -> int:
        for turn in range(most_turns):
            if "part" in self.bench.done:
                return turn
            self.turn()
        raise AssertionError(f"not done after {self.deaths} deaths")


@pytest.mark.parametrize("deadly", [(0,), (3,), (1, 2)])
def test_what_members_die_of_is_found_and_the_rest_is_done(deadly: tuple[int, ...]) -> None:
    world = World(deadly=deadly)
    world.run()
    assert world.bench.done == ["part"]
    assert world.guilty == dict.fromkeys(deadly, 2 * MOST_DEATHS)
    assert world.deaths == MOST_DEATHS + MOST_DEATHS * len(deadly)


def test_other_work_goes_on_meanwhile() -> None:
    world = World(deadly=(2,), num_members=3)
    others = {f"other{n}" for n in range(20)}
    for name in others:
        world.bench.submit(name, job="another", keep=True)
    world.run()
    assert others <= set(world.bench.done), "the part is the last"
    assert world.guilty.keys() == {2}


def test_a_suspect_that_is_released_where_it_is_found_leaves_the_next_ones_trials_alone() -> None:
    """An index is tried as a whole, and given up where it is guilty; the part behind it is tried from its first sample on."""
    world = World(deadly=(0, 100))
    fleet = world.bench.fleet
    index = world.bench.work("try 100", priority=-1)

    def guilty(deaths: int) -> None:
        world.guilty[100] = deaths
        fleet.release([index])

    index.trials = lambda _work: [Trial(world.bench.work("try 100"), guilty)]
    fleet.release([world.work])
    fleet.submit(index)
    for _ in range(MOST_DEATHS):
        world.turn()
    fleet.submit(world.work)
    world.run()
    assert (world.bench.done, world.guilty) == (["part"], {0: 2 * MOST_DEATHS, 100: 2 * MOST_DEATHS})
    assert world.deaths <= 4 * MOST_DEATHS, "nobody died of the part again once its samples were tried"


def test_the_last_suspect_may_be_released_where_it_is_found() -> None:
    world = World(deadly=(100,))
    fleet = world.bench.fleet
    fleet.release([world.work])
    index = world.bench.work("try 100")
    index.trials = lambda _work: [Trial(world.bench.work("try 100"), lambda deaths: fleet.release([index]))]
    fleet.submit(index)
    for _ in range(100):
        world.turn()
    assert world.deaths == 2 * MOST_DEATHS


def die(world: World) -> str:
    """Who has the part, or the present trial, dies."""
    member = next(member for member in world.bench.fleet.members.values() if member.leases)
    world.bench.fleet.leave(member, "connection closed", died=True)
    return member.name


@pytest.mark.parametrize("died", [False, True], ids=["in order", "twice, by chance"])
def test_members_that_end_prove_nothing(died: bool) -> None:
    """In order they may end as often as they like; after two deaths the samples are tried, and all of them are good."""
    world = World()
    for _ in range(10 if not died else MOST_DEATHS):
        world.join()
        member = next(member for member in world.bench.fleet.members.values() if member.leases)
        world.bench.fleet.leave(member, "x", died=died)
    assert any("try" in order for sent in world.bench.sent.values() for order in sent) == died
    world.run()
    assert (world.bench.done, world.guilty) == (["part"], {})


def test_a_member_that_is_back_has_not_died() -> None:
    """Streams broke for all at once, again and again, as those of a service that was stopped for a while."""
    world = World()
    for _ in range(10):
        world.pass_s(GONE_S / 3)
        world.join(die(world))
    assert not any("try" in order for sent in world.bench.sent.values() for order in sent)
    for name in (die(world), die(world)):
        world.join(name)
    for _ in range(10):  # the samples are on trial now
        name = die(world)
        world.pass_s(GONE_S / 3)
        world.join(name)
    world.run()
    assert (world.bench.done, world.guilty) == (["part"], {})


def test_work_that_was_done_after_deaths_is_not_tried_when_its_keeper_dies() -> None:
    """It is done again, and what another member died of before does not count any more."""
    world = World(num_members=1)
    bench = world.bench
    die(world)
    for _ in range(3):
        keeper = world.join()
        finish(bench, keeper, world.work)
        bench.fleet.leave(keeper, "connection closed", died=True)
        world.pass_s(2 * GONE_S)
    world.join()
    assert not any("try" in order for sent in bench.sent.values() for order in sent)
    die(world)
    world.join()
    assert not any("try" in order for sent in bench.sent.values() for order in sent), "one death since it was done"


def test_a_job_that_ends_ends_its_trials() -> None:
    world = World(deadly=(0,))
    while not any("try" in order for sent in world.bench.sent.values() for order in sent):
        world.turn()
    world.bench.submit("second", keep=True, job="another")
    world.bench.fleet.close_job("job", "close")
    for _ in range(20):
        world.turn()
    assert "second" in world.bench.done
    assert not [work for member in world.bench.fleet.members.values() for work in member.leases.values()]
    assert world.guilty == {}
