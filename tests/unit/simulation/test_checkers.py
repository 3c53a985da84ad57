"""The checkers of a simulated run: what ranks have had of a step before it is committed, also where the job goes back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.simulation.checkers import Checkers, Expected
from tests.simulation.simulated_redis import SimulatedRedis
from tests.simulation.store_link import Request
from tests.simulation.trainers import Trainers
from tests.simulation.world import World

JOB, LEDGER = "headrace:{job}:job", "headrace:{job}:ledger"
STEPS = 3


class Story:
    """A job of one rank whose store is written by hand: step n has sample n."""

    def __init__(self) -> None:
        world = World(0)
        self.loop, self.redis = world.loop, world.store.redis
        self.trainers = Trainers(world, "job", 1, step_s=(1.0, 1.0), together=False)
        expected = Expected(
            ledger=tuple(json.dumps([[str(n)], [], 0.0]) for n in range(STEPS)),
            quarantine=frozenset(),
            ids=tuple(frozenset({n}) for n in range(STEPS)),
        )
        self.checkers = Checkers(world, self.trainers, "job", expected, lambda: True)
        self._client = world.new_process("leader")
        self._look = world.store.on_request
        self.write(("SET", "headrace:term", "1 x"))

    def write(self, *commands: tuple[str | int, ...]) -> None:
        def act(redis: SimulatedRedis) -> None:
            for command in commands:
                redis.command(*command)

        self.loop.now_s += 1.0
        act(self.redis)
        self._look(Request(self._client, act, 1), self.redis)

    def deliver(self, step: int) -> None:
        self.trainers.delivered[0, step] = (step,)

    def commit(self, step: int) -> None:
        entry = json.dumps({"samples": [str(step)], "substitutes": [], "loss": 0.0})
        self.write(("RPUSH", LEDGER, entry), ("HSET", JOB, "cursor", step + 1))

    def reset(self) -> None:
        self.write(("DEL", LEDGER), ("HSET", JOB, "cursor", 0))

    def put_back(self, to_s: float) -> None:
        self.redis.put_back(to_s)
        self.checkers.put_back()


@pytest.fixture
def story() -> Iterator[Story]:
    story = Story()
    yield story
    story.loop.close()


def test_a_step_is_committed_after_its_samples_have_come_also_once_more_after_a_reset(story: Story) -> None:
    for _ in range(2):
        story.deliver(0)
        story.commit(0)
        story.reset()
    assert story.checkers.violations == []
    story.commit(0)
    assert len(story.checkers.violations) == 1
    assert "before rank 0 has its samples" in story.checkers.violations[0]


def test_what_a_rank_had_before_a_reset_counts_where_the_store_has_lost_the_reset(story: Story) -> None:
    story.deliver(0)
    story.commit(0)
    story.deliver(1)
    before_s = story.loop.time()
    story.reset()
    story.put_back(before_s)
    story.commit(1)
    assert story.checkers.violations == []


def test_what_a_rank_had_before_a_reset_does_not_count_where_the_store_has_lost_only_what_came_later(story: Story) -> None:
    story.deliver(0)
    story.commit(0)
    story.reset()
    after_s = story.loop.time()
    story.deliver(0)
    story.commit(0)
    del story.trainers.delivered[0, 0]
    story.put_back(after_s)
    story.commit(0)
    assert len(story.checkers.violations) == 1
