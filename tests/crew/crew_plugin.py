"""pytest's option `--crew`, and what it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crew.crew import Crew
from tests.crew.dealing import Deck, TestFile

LOAD_OF_PROCESSES = 20
"""A test that starts processes takes as long as so many others."""
ROOM_DEPTH = 3
"""tests/unit/trainer is a room, all that is in it included."""


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "run the tests in so many forks of the process that has collected them; 0: in that process"
    parser.getgroup("crew").addoption("--crew", type=int, default=0, metavar="NUMBER", help=told)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if not option.crew or option.collectonly or session.testsfailed or not session.items:
        return None
    Crew(session, Deck(files_of(session))).run(option.crew)
    return True


def files_of(session: pytest.Session) -> list[TestFile]:
    """The files of a session's items, in which they have kept their order."""
    tests: dict[Path, list[int]] = {}
    for number, item in enumerate(session.items):
        tests.setdefault(item.path, []).append(number)
    return [
        TestFile(
            room="/".join(path.parent.relative_to(session.config.rootpath).parts[:ROOM_DEPTH]),
            tests=numbers,
            load=sum(LOAD_OF_PROCESSES if session.items[n].get_closest_marker("integration") else 1 for n in numbers),
        )
        for path, numbers in tests.items()
    ]
