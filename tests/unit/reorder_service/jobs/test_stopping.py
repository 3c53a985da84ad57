"""Work of a call goes on to its end where the call is cancelled, and its error is logged then instead of being lost."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import UnavailableError
from headrace.reorder_service.jobs.stopping import to_its_end

LEFT = "failed when nobody waited any more work=a_change"


async def cancelled_call(done: asyncio.Event, error: Exception | None) -> list[str]:
    """What became of the work of a call that was cancelled before `done`, and what asyncio says of errors that nobody took."""
    came_to: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: came_to.append(context["message"]))

    async def a_change() -> None:
        await done.wait()
        came_to.append("an end")
        if error is not None:
            raise error

    a_change.__qualname__ = "a_change"
    call = asyncio.create_task(to_its_end(a_change()))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert came_to == []
    done.set()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    return came_to


async def test_the_result_and_the_error_are_the_callers_as_long_as_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(give: Callable[[], Any]) -> Any:
        return give()

    assert await to_its_end(answer(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        await to_its_end(answer(lambda: 1 // 0))
    assert caplog.records == []


async def test_work_whose_call_is_cancelled_comes_to_its_end() -> None:
    assert await cancelled_call(asyncio.Event(), None) == ["an end"]


@pytest.mark.parametrize(("error", "level"), [(UnavailableError("no store"), logging.INFO), (KeyError("a bug"), logging.ERROR)])
async def test_an_error_that_nobody_waits_for_is_logged(error: Exception, level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert await cancelled_call(asyncio.Event(), error) == ["an end"], "asyncio has nothing to complain of"
    assert [(record.levelno, record.getMessage().startswith(LEFT)) for record in caplog.records] == [(level, True)]
