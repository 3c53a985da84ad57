"""A fork of a crew: it runs tests that are dealt to it, and tells what becomes of them.

A line of JSON each way: it says {"kind": "idle"} and gets the numbers of a file's tests, none once all are dealt. Of each test it
says {"kind": "begin"}, then what pytest's hooks get: "logstart", "report", "logfinish". With {"kind": "done"} it ends.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import traceback
import weakref
from functools import partial
from typing import Any, NoReturn

import pytest
from _pytest._io import TerminalWriter

from tests.nursery.forking import die_with_parent, end

INTERRUPTED, BROKEN = 130, 3
"""Exit codes."""


class Teller:
    """A plugin that tells the other process what its terminal reporter would print here."""

    def __init__(self, config: pytest.Config, mouth: socket.socket) -> None:
        self._config = config
        self._mouth = mouth

    def say(self, kind: str, **said: Any) -> None:
        self._mouth.sendall(json.dumps({"kind": kind} | said).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.say("logstart", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.say("report", data=self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.say("logfinish", nodeid=nodeid, location=location)


class _Printed(io.TextIOBase):
    """What is written comes among what the test prints."""

    def write(self, text: str, /) -> int:
        return sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()


class Reporter:
    """In the place of the terminal reporter, for plugins that look there: pytest-timeout writes what a test's threads do."""

    def __init__(self) -> None:
        self._tw = TerminalWriter(_Printed())
        self.stats: dict[str, list[Any]] = {}


def be_a_member(session: pytest.Session, number: int, mouth: socket.socket) -> NoReturn:
    """In a fork: run what is dealt to it until nothing is left, and end."""
    code = BROKEN
    try:
        code = _work(session, number, mouth)
    finally:  # whatever happens, this process does not go on as the other one
        try:
            end(code)
        finally:
            os._exit(code)


def _work(session: pytest.Session, number: int, mouth: socket.socket) -> int:
    try:
        die_with_parent()
        teller = Teller(session.config, mouth)
        _have_own(session.config, number, teller)
        with mouth.makefile() as dealt:
            _run(session, teller, dealt)
        teller.say("done")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        session._setupstate.teardown_exact(None)
        return INTERRUPTED
    except BaseException:
        traceback.print_exc()
        return BROKEN
    return 0


def _have_own(config: pytest.Config, number: int, teller: Teller) -> None:
    """Leave to the other process what is its own: its files for captured output, its temporary folders, its terminal."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # they would take away what the other process has made
    plugins = config.pluginmanager
    captured = plugins.get_plugin("capturemanager")
    captured.stop_global_capturing()
    captured.start_global_capturing()
    captured.suspend_global_capture()
    folders = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"member-{number}"
    folders._basetemp.mkdir(mode=0o700)
    folders._exit_stack.pop_all()
    plugins.unregister(name="terminalreporter")
    plugins.register(Reporter(), "terminalreporter")
    plugins.register(teller)


def _run(session: pytest.Session, teller: Teller, dealt: io.TextIOBase) -> None:
    """Run all that is dealt. What a file's last test leaves set up is for the whole session: it is torn down at the end."""
    items = session.items
    last = None
    while not (session.shouldfail or session.shouldstop):
        teller.say("idle")
        tests = json.loads(dealt.readline())
        if not tests:
            break
        last = items[tests[-1]]
        elsewhere = next((item for item in (items[0], items[-1]) if item.path != last.path), None)
        for number, following in zip(tests, [*(items[n] for n in tests[1:]), elsewhere], strict=True):
            teller.say("begin", test=number)
            session.config.hook.pytest_runtest_protocol(item=items[number], nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
    if last is not None:
        _tear_down(session, last)


def _tear_down(session: pytest.Session, last: pytest.Item) -> None:
    """Tear down what is set up once a session. An error is the last test's, as it is without a crew."""
    captured = session.config.pluginmanager.get_plugin("capturemanager")
    with captured.item_capture("teardown", last):
        call = pytest.CallInfo.from_call(partial(session._setupstate.teardown_exact, None), when="teardown")
    if call.excinfo is not None:
        last.ihook.pytest_runtest_logreport(report=last.ihook.pytest_runtest_makereport(item=last, call=call))
