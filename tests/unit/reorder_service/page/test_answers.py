"""Answers are made once for all who ask within a second, errors too, and are known again by their ETag."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from headrace.errors import HeadraceError, NotFoundError
from headrace.reorder_service.page.answers import FRESH_S, MOST_ANSWERS, Answer, Answers, encoded


def status_of(error: HeadraceError) -> int:
    return 404 if isinstance(error, NotFoundError) else 400


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_all_who_ask_at_once_get_one_answer_and_so_do_those_who_ask_soon() -> None:
    clock, made, gate = Clock(), [], asyncio.Event()
    answers = Answers(clock)

    async def make() -> Answer:
        made.append(clock.now_s)
        await gate.wait()
        return Answer.of_value(len(made))

    asking = [asyncio.create_task(answers.get("/api/jobs", make, status_of)) for _ in range(50)]
    await asyncio.sleep(0)
    asking[0].cancel()  # who goes away takes nothing from the others
    gate.set()
    rest = await asyncio.gather(*asking[1:])
    assert {answer.body for answer in rest} == {b"1"}
    clock.now_s += FRESH_S * 0.9
    assert (await answers.get("/api/jobs", make, status_of)).body == b"1"
    assert (await answers.get("/api/service", make, status_of)).body == b"2"
    clock.now_s += FRESH_S * 0.2
    assert (await answers.get("/api/jobs", make, status_of)).body == b"3"
    assert len(made) == 3


async def test_an_error_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers()

    async def miss() -> Answer:
        raise NotFoundError("no job 'x' here: submit it")

    async def fail() -> Answer:
        raise ZeroDivisionError

    missed = await answers.get("a", miss, status_of)
    assert (missed.status, missed.body) == (404, b'{"error":"no job \'x\' here: submit it"}')
    with caplog.at_level(logging.ERROR):
        failed = await answers.get("b", fail, status_of)
    assert (failed.status, b"see the reorder service's log" in failed.body) == (500, True)
    assert "page: no answer" in caplog.text


async def test_what_is_kept_has_a_bound() -> None:
    answers = Answers(Clock())

    async def make() -> Answer:
        return Answer.of_value(None)

    for number in range(MOST_ANSWERS + 20):
        await answers.get(f"/api/jobs/{number}", make, status_of)
    assert len(answers._held) == MOST_ANSWERS


def test_an_etag_is_that_of_the_content() -> None:
    one, same, other = Answer.of_value([1]), Answer.of_value([1]), Answer.of_value([2])
    assert one.headers["ETag"] == same.headers["ETag"] != other.headers["ETag"]
    tag = one.headers["ETag"]
    assert [one.is_known_by(said) for said in (None, tag, f'"x", W/{tag}', "*", '"x"')] == [False, True, True, True, False]
    assert not Answer.of_error(404, "no").is_known_by("*")
    with pytest.raises(ValueError, match="JSON"):
        Answer.of_value(float("nan"))


@pytest.mark.parametrize("count", [0, 1, 99, 100, 101, 250])
def test_what_is_encoded_piece_by_piece_is_the_same(count: int) -> None:
    flat = [{"rank": n, "name": "é", "step_s": None} for n in range(count)]
    nested = {"rows": [{"name": str(n), "actions": list(range(count))} for n in range(count)], "flat": flat, "empty": {}}
    assert json.loads(encoded(nested)) == nested
    assert encoded(nested) == json.dumps(nested, separators=(",", ":"))
