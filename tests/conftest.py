"""For every test: gRPC's own log stays out of the output, commands are started by exec, Ctrl-C is heard, hypothesis draws the
same examples every time, for as long as they take, transformers finds a torchaudio that loads, torch takes one thread, what
multiprocessing forks is forked from a process that has imported torch, which one worker has, tries are counted without a wait,
files that wait come among files that compute, and garbage is sought among what is new."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; there is a worker for each processor
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored, which children would inherit
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.nursery.preloaded"])


WAITING = Path(__file__).parent / "integration"
COMMANDS = "tests.chaos_trainer.node_nursery"
"""What forks the commands of tests/integration."""
LAST_WAITING = 0.85
"""The share of all other files after which the last one of these begins."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--thorough`: each property is tried with as many examples as it names, or 100, instead of some of them."""
    parser.addoption("--thorough", action="store_true", help="draw all examples of each property, where the suite draws some")


def pytest_configure(config: pytest.Config) -> None:
    """Import what a process needs that runs tests: not the one that deals them out to others, which would take seconds for it.
    That one has a mother of nurseries for all of them."""
    if getattr(config.option, "numprocesses", None):
        from tests.nursery import mother

        stack = ExitStack()
        os.environ[mother.ADDRESS] = stack.enter_context(mother.standing(COMMANDS))
        config.add_cleanup(stack.close)
        return
    gc.disable()  # until all is collected: nearly all that is made until then stays
    import headrace.torchaudio_import  # noqa: F401  # its native part fails beside torch for the CPU, whoever imports it first
    from tests.examples import load

    load(thorough=config.getoption("thorough"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `--dist loadfile`, one that has files together which start the same."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.forking_files import FilesTogether

    return FilesTogether(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have pytest-rerunfailures send what it counts at once.

    It writes twice to its socket before it reads an answer, so that of a short test the second write waited for the receipt of
    the first, which the system holds back for 40 ms (Nagle's algorithm): six minutes of 9,000 tests.
    """
    counting = getattr(getattr(session.config, "failures_db", None), "sock", None)  # none without xdist
    if counting is not None:
        counting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker have files whose tests wait for other processes begin one by one among the others, and none of them last.

    Those that wait together leave cores idle; whoever has one at the end is waited for.
    """
    if not hasattr(config, "workerinput"):
        return
    places: dict[Path, float] = {}
    for waiting, share in ((True, LAST_WAITING), (False, 1.0)):
        paths = list(dict.fromkeys(item.path for item in items if (WAITING in item.path.parents) == waiting))
        places |= {path: share * number / len(paths) for number, path in enumerate(paths)}
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    """Have no later search for garbage look at 9,000 collected tests and the modules, which took half a second each time; and
    the planner be warmed up once only."""
    if "headrace.reorder_service.planning" in sys.modules:
        from tests.nursery.kernels import warm_up_once

        warm_up_once()
    gc.collect()
    gc.freeze()
    gc.enable()
