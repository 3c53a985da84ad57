"""Preprocessors to fetch from, clients that fetch, and processes that can be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.trainer.loading.part_client import PartClient
from headrace.transport.base import TRANSPORTS
from headrace.transport.ucx import UcxReceiver
from headrace.transport.ucx_buffers import ReceiveBuffers
from headrace.transport.ucx_loop import UcxLoop
from headrace.transport.ucx_server import UcxServer
from tests.unit.proto.transport import payload_world, ucx_world
from tests.unit.proto.transport.ucx_world import Lender
from tests.unit.trainer.loading import loader_world
from tests.wire import Wire

_ROOT = Path(__file__).parents[4]


@pytest.fixture
def make_batch() -> Callable[..., Any]:
    """(num_bytes, sample_id) -> a batch of one sample whose payload bytes are all sample_id % 256."""
    make: Callable[..., Any] = payload_world.make_batch
    return make


@pytest.fixture
def make_rows() -> Callable[..., Any]:
    """(sizes, sample_id) -> a batch of one sample for each size, with that many payload bytes of the sample's id % 256."""
    make: Callable[..., Any] = payload_world.make_rows
    return make


@pytest.fixture
def make_producer() -> Iterator[Callable[..., Any]]:
    """(budget_bytes, **options) -> a Producer, stopped at the end unless the test has stopped it."""
    with ExitStack() as stack:

        def make(budget_bytes: int = 16 << 20, **options: Any) -> Any:
            producer = payload_world.Producer(budget_bytes, **options)
            stack.callback(producer.stop)
            return producer

        yield make


@pytest.fixture
def make_wire() -> Iterator[Callable[..., Any]]:
    """(producer, **faults) -> a Wire in front of its Flight server, of which clients are told from then on."""
    with ExitStack() as stack:

        def make(producer: Any, **faults: Any) -> Any:
            wire = Wire(producer.flight_endpoint, **faults)
            stack.callback(wire.stop)
            producer.servicer.offer.flight_port = wire.port
            return wire

        yield make


@pytest.fixture
def make_world() -> Iterator[Callable[[], Any]]:
    """() -> a reorder service that tells a loader what the test says."""
    with ExitStack() as stack:

        def make() -> Any:
            world = loader_world.World()
            stack.callback(world.stop)
            return world

        yield make


@pytest.fixture
def make_client() -> Iterator[Callable[..., PartClient]]:
    """(*transports, **options) -> a PartClient."""
    with ExitStack() as stack:

        def make(*transports: str, **options: Any) -> PartClient:
            client = PartClient(transports or TRANSPORTS, **options)
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture
def spawn() -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[str]]]]:
    """(*arguments of payload_world.py) -> (process, words of its first line). Killed at the end."""
    with ExitStack() as stack:
        yield partial(_start, stack, Path(payload_world.__file__))


@pytest.fixture
def spawn_ucx() -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[str]]]]:
    """The same of ucx_world.py."""
    with ExitStack() as stack:
        yield partial(_start, stack, Path(ucx_world.__file__))


def _start(stack: ExitStack, script: Path, *arguments: str) -> tuple[subprocess.Popen[str], list[str]]:
    command = [sys.executable, str(script), *arguments]
    process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT))
    stack.callback(process.kill)
    assert process.stdout is not None
    return process, process.stdout.readline().split()


# -- UCX by itself ----------------------------------------------------------------------------------------------------


@pytest.fixture
def make_lender() -> Iterator[Callable[..., Lender]]:
    """(**options of its server) -> a Lender."""
    with ExitStack() as stack:

        def make(**options: Any) -> Lender:
            lender = Lender(**options)
            stack.callback(lender.stop)
            return lender

        yield make


@pytest.fixture
def lender(make_lender: Callable[..., Lender]) -> Lender:
    return make_lender()


@pytest.fixture
def server(lender: Lender) -> UcxServer:
    """The lender's."""
    return lender.server


@pytest.fixture
def ucx() -> Iterator[UcxLoop]:
    """Of the consumers."""
    with closing(UcxLoop("ucx-test")) as loop:
        yield loop


@pytest.fixture
def buffers() -> ReceiveBuffers:
    """Of the receiver."""
    return ReceiveBuffers()


@pytest.fixture
def receiver(server: UcxServer, ucx: UcxLoop, buffers: ReceiveBuffers) -> UcxReceiver:
    """Connected to the server."""
    return ucx_world.connect(ucx, server, buffers)
