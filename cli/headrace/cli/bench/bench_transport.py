"""`headrace bench transport`: measures how fast each transport moves payload between two processes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from headrace.child_process import with_parent_death_signal
from headrace.cli.run.authority import FOLDERS, make_papers
from headrace.errors import HeadraceError, UserError
from headrace.identity import TLS
from headrace.trainer.loading.part_client import PartClient
from headrace.transport.base import SHARED_MEMORY, TRANSPORTS

MIB = 1 << 20
SIZES = (8 * MIB, 64 * MIB)  # part sizes, one that fits into the processor's cache and one that does not
FETCHES = 24  # scales the number of fetches per size and round
THREADS = 4  # as many as a trainer's
ROUNDS = 6
PEER_LIFETIME_S = 600.0  # after which the sending process is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Throughput from one process to another in bytes/s, and the processor time of both ends in seconds per GB."""

    bytes_per_s: float
    cpu_s_per_gb: float
    """The receiver's."""
    sender_cpu_s_per_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportFigures:
    """The results of `headrace bench transport`; sizes are those of parts in bytes.

    Each rate is the best of the rounds, because other load on the machine only slows transfers down.
    """

    raw: Mapping[int, Rate]
    """Size -> rate of a TCP socket on loopback, receiving into one buffer that is reused."""
    rates: Mapping[str, Mapping[int, Rate]]
    """Transport -> size -> rate of fetching parts as a trainer does, THREADS at a time."""
    single: Mapping[str, Mapping[int, Rate]]
    """Transport -> size -> rate of fetching parts one at a time."""
    hand_off_s: Mapping[int, float]
    """Size -> seconds from asking for a part in shared memory to having it as an Arrow batch: the median of the best round."""
    write_s: Mapping[int, float]
    """Size -> seconds that a preprocessor takes to write a part into warm shared memory."""
    memcpy_s: Mapping[int, float]
    """Size -> seconds that one copy of as many bytes takes in the preprocessor."""
    impossible: Mapping[str, str]
    """Transport -> why it is not available on this machine."""


def measure(rounds: int = ROUNDS, say: Callable[[str], object] = lambda _: None, *, encrypted: bool = False) -> TransportFigures:
    """Start the sending process and measure all transports and sizes in turn, `rounds` times.

    `say` is called with a text before each measurement. `encrypted`: with mutual TLS, but for the raw socket. Raises UserError
    where the sending process cannot be started, for example because shared memory is too small.
    """
    with _papers(encrypted) as papers, _peer(papers["preprocessor"]) as peer:
        facts = peer.facts
        endpoint, tickets = facts["endpoint"], {int(size): names for size, names in facts["tickets"].items()}
        clients, impossible = _clients(endpoint, tickets[SIZES[0]][0], papers["trainer"])
        raw: dict[int, list[Rate]] = {size: [] for size in SIZES}
        rates: dict[str, dict[int, list[Rate]]] = {name: {size: [] for size in SIZES} for name in clients}
        single: dict[str, dict[int, list[Rate]]] = {name: {size: [] for size in SIZES} for name in clients}
        hand_off: dict[int, list[float]] = {size: [] for size in SIZES}
        for number in range(rounds):
            for size in SIZES:
                say(f"round {number + 1} of {rounds}: parts of {size // MIB} MiB")
                raw[size].append(_raw_rate(peer, size))
                for name, client in clients.items():
                    rates[name][size].append(_fetch_rate(client, peer, tickets[size], size, THREADS))
                    single[name][size].append(_fetch_rate(client, peer, tickets[size], size, 1))
                if SHARED_MEMORY in clients:
                    hand_off[size].append(statistics.median(_hand_offs(clients[SHARED_MEMORY], endpoint, tickets[size])))
        for client in clients.values():
            client.close()
    return TransportFigures(
        raw=_best(raw),
        rates={name: _best(of) for name, of in rates.items()},
        single={name: _best(of) for name, of in single.items()},
        hand_off_s={size: min(medians) for size, medians in hand_off.items() if medians},
        write_s={int(size): times["write_s"] for size, times in facts["writes"].items()},
        memcpy_s={int(size): times["memcpy_s"] for size, times in facts["writes"].items()},
        impossible=impossible,
    )


@contextlib.contextmanager
def _papers(encrypted: bool) -> Iterator[Mapping[str, str]]:
    """Yield the folders of papers that are made for the block, by kind of process; empty names unless `encrypted`."""
    if not encrypted:
        yield dict.fromkeys(FOLDERS, "")
        return
    with tempfile.TemporaryDirectory(prefix="headrace-papers-") as folder:
        list(make_papers(Path(folder), days=1))
        yield {name: f"{folder}/{name}" for name in FOLDERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """The sending process (`bench_peer`)."""

    facts: Mapping[str, Any]
    process: subprocess.Popen[str]

    def cpu_s(self) -> float:
        """Return the seconds of processor time that it has taken."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


@contextlib.contextmanager
def _peer(tls: str) -> Iterator[_Peer]:
    command = [sys.executable, "-m", "headrace.cli.bench.bench_peer", *map(str, SIZES)]
    with subprocess.Popen(
        with_parent_death_signal(command, signal.SIGKILL),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, TLS: tls},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        errors: list[str] = []
        drain = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
        drain.start()
        patience = threading.Timer(PEER_LIFETIME_S, process.kill)
        patience.start()
        try:
            line = process.stdout.readline()
            if not line:
                process.wait()
                drain.join(1.0)
                raise UserError(f"the benchmark's preprocessor did not start: {(errors or ['no message'])[-1].strip()}")
            yield _Peer(facts=json.loads(line), process=process)
        except BaseException:
            process.kill()
            raise
        finally:
            process.stdin.close()
            process.wait()
            patience.cancel()


def _clients(endpoint: str, ticket: str, tls: str) -> tuple[dict[str, PartClient], dict[str, str]]:
    """Return a client for each transport that works on this machine, and for each other transport why it does not."""
    clients, impossible = {}, {}
    for name in TRANSPORTS:
        client = PartClient((name,), tls=tls)
        try:
            client.fetch(endpoint, ticket).delivery.release()
        except HeadraceError as err:
            impossible[name] = str(err)
            client.close()
        else:
            clients[name] = client
    return clients, impossible


def _raw_rate(peer: _Peer, num_bytes: int) -> Rate:
    """Measure a raw TCP socket, with as many bytes per call as `_fetch_rate`: the best of shorter calls would look too good."""
    buffer = memoryview(bytearray(num_bytes))
    with socket.create_connection(("127.0.0.1", peer.facts["raw_port"]), timeout=PEER_LIFETIME_S) as connection:

        def receive() -> None:
            for _ in range(THREADS):
                connection.sendall(num_bytes.to_bytes(8, "little"))
                end = 0
                while end < num_bytes:
                    end += connection.recv_into(buffer[end:])

        return _rate(peer, receive, THREADS * num_bytes)


def _fetch_rate(client: PartClient, peer: _Peer, tickets: list[str], num_bytes: int, threads: int) -> Rate:
    endpoint = peer.facts["endpoint"]
    with ThreadPoolExecutor(threads) as pool:

        def fetch(number: int) -> None:
            client.fetch(endpoint, tickets[number % len(tickets)]).delivery.release()

        return _rate(peer, lambda: list(pool.map(fetch, range(threads))), threads * num_bytes)


def _rate(peer: _Peer, call: Callable[[], object], num_bytes: int) -> Rate:
    """Return the throughput of the fastest call, after a first one to warm up, and the processor time of all calls."""
    call()
    calls = max(3, FETCHES * SIZES[-1] // num_bytes // 8)
    seconds, sender_cpu, cpu = [], peer.cpu_s(), process_time()
    for _ in range(calls):
        begin = perf_counter()
        call()
        seconds.append(perf_counter() - begin)
    cpu, sender_cpu = process_time() - cpu, peer.cpu_s() - sender_cpu
    gigabytes = calls * num_bytes / 1e9
    return Rate(bytes_per_s=num_bytes / min(seconds), cpu_s_per_gb=cpu / gigabytes, sender_cpu_s_per_gb=sender_cpu / gigabytes)


def _hand_offs(client: PartClient, endpoint: str, tickets: list[str]) -> list[float]:
    seconds = []
    for number in range(8 * FETCHES):
        begin = perf_counter()
        part = client.fetch(endpoint, tickets[number % len(tickets)])
        seconds.append(perf_counter() - begin)
        part.delivery.release()
    return seconds


def _best(rates: Mapping[int, list[Rate]]) -> dict[int, Rate]:
    return {
        size: Rate(
            bytes_per_s=max(rate.bytes_per_s for rate in of),
            cpu_s_per_gb=min(rate.cpu_s_per_gb for rate in of),
            sender_cpu_s_per_gb=min(rate.sender_cpu_s_per_gb for rate in of),
        )
        for size, of in rates.items()
    }
