"""Views are looked at once for all who watch them; each viewer is told all at first, and then what has changed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.errors import UserError
from headrace.reorder_service.page import watched_views
from headrace.reorder_service.page.answers import Answer
from headrace.reorder_service.page.watched_views import Views, parts_of

VIEW = ("service", "jobs/a")


class World:
    """What a service would answer, and how often it was asked."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"service": {"leading": True}, "jobs/a": {"steps": 1}}
        self.asked = Counter[str]()
        self.views = Views(self.ask)

    async def ask(self, path: str) -> Answer:
        self.asked[path] += 1
        return Answer.of_value(self.values[path]) if path in self.values else Answer.of_error(404, "no such job")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(watched_views, "FRESH_S", 0.001)
    monkeypatch.setattr(watched_views, "ALIVE_S", float("inf"))
    return World()


async def told(lines: AsyncIterator[bytes]) -> Any:
    """The next line as a value; None for an empty one."""
    line = await anext(lines)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    return json.loads(line) if line.strip() else None


async def test_a_viewer_is_told_all_and_then_what_has_changed(world: World) -> None:
    async with world.views.watched(VIEW) as view:
        lines = view.lines()
        assert await told(lines) == {
            "service": {"status": 200, "body": {"leading": True}},
            "jobs/a": {"status": 200, "body": {"steps": 1}},
        }
        world.values["jobs/a"] = {"steps": 2}
        assert await told(lines) == {"jobs/a": {"status": 200, "body": {"steps": 2}}}
        del world.values["jobs/a"]
        assert await told(lines) == {"jobs/a": {"status": 404, "body": {"error": "no such job"}}}


async def test_one_look_serves_all_viewers_and_there_is_none_without_them(world: World) -> None:
    async with world.views.watched(VIEW) as first:
        lines = first.lines()
        await told(lines)
        async with world.views.watched(VIEW) as second:
            assert (second, world.views.num_viewers) == (first, 2)
            seen = sum(world.asked.values())
            late = second.lines()
            assert set(await told(late)) == set(VIEW)  # at once: the view is there already
            assert sum(world.asked.values()) == seen
            world.values["service"] = {"leading": False}
            assert await told(lines) == await told(late) == {"service": {"status": 200, "body": {"leading": False}}}
        assert world.views.num_viewers == 1
    assert world.views.num_viewers == 0
    seen = sum(world.asked.values())
    await asyncio.sleep(0.02)  # time for some more looks, if there were any
    assert sum(world.asked.values()) == seen


async def test_where_nothing_changes_an_empty_line_says_that_it_is_alive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_views, "ALIVE_S", 0.0)
    async with world.views.watched(VIEW) as view:
        lines = view.lines()
        assert [await told(lines) is None for _ in range(4)] == [False, True, True, True]


async def test_what_a_viewer_has_missed_while_it_read_nothing_is_told_at_once(world: World) -> None:
    async with world.views.watched(VIEW) as slow, world.views.watched(VIEW) as quick:
        behind, ahead = slow.lines(), quick.lines()
        await told(behind)
        await told(ahead)
        for steps in (2, 3, 4):
            world.values["jobs/a"] = {"steps": steps}
            await told(ahead)
        assert await told(behind) == {"jobs/a": {"status": 200, "body": {"steps": 4}}}


async def test_a_service_that_stops_ends_what_its_viewers_are_told(world: World) -> None:
    async with world.views.watched(VIEW) as view:
        lines = view.lines()
        await told(lines)
        world.views.end()
        assert [line async for line in lines] == []


def test_a_view_has_one_to_four_paths_each_once() -> None:
    assert parts_of("ask=service&ask=jobs%2Fa%252Fb&ask=service&other=1") == ("service", "jobs/a%2Fb")
    for query in ("", "asks=service", "ask=a&ask=b&ask=c&ask=d&ask=e", f"ask={'x' * 401}"):
        with pytest.raises(UserError, match="takes one to 4 paths below /api/"):
            parts_of(query)
