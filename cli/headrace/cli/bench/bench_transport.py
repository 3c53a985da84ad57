"""`headrace bench transport`: how fast payload gets from one process to another on this machine, by every transport."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

from headrace.child import ending_with_us
from headrace.errors import HeadraceError, UserError
from headrace.trainer.loading.session import PartClient
from headrace.transport.base import SHARED_MEMORY, TRANSPORTS

MIB = 1 << 20
SIZES = (8 * MIB, 64 * MIB)  # of a part: one that the processor's cache holds, one that it does not
FETCHES = 24  # of a size and a round
THREADS = 4  # as a trainer's
ROUNDS = 6
LONGEST_S = 600.0  # that the far end lives


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Bytes per second from one process into another, and the receiver's processor time."""

    bytes_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured. Each rate is the best of the rounds: what else runs on the machine only slows."""

    raw: Mapping[int, Rate]
    """Size -> a TCP socket on loopback into one buffer that is used again."""
    rates: Mapping[str, Mapping[int, Rate]]
    """Transport -> size -> parts fetched as a trainer fetches them, several at a time."""
    single: Mapping[str, Mapping[int, Rate]]
    """The same, one part at a time."""
    hand_off_s: Mapping[int, float]
    """Size -> from asking for a part in shared memory to having it as an Arrow batch: the median of the best round."""
    write_s: Mapping[int, float]
    """Size -> a preprocessor's seconds to put a part into warm shared memory."""
    memcpy_s: Mapping[int, float]
    """Size -> of one copy of as many bytes there."""
    impossible: Mapping[str, str]
    """Transport -> why it cannot be had here."""


def measure(rounds: int = ROUNDS, say: Callable[[str], object] = lambda _: None) -> Figures:
    """Start the far end, and measure in turns. `say` is told what comes next.

    Raises UserError where the far end cannot be started, for one that shared memory is too small.
    """
    with _peer() as facts:
        endpoint, tickets = facts["endpoint"], {int(size): names for size, names in facts["tickets"].items()}
        clients, impossible = _clients(endpoint, tickets[SIZES[0]][0])
        raw: dict[int, list[Rate]] = {size: [] for size in SIZES}
        rates: dict[str, dict[int, list[Rate]]] = {name: {size: [] for size in SIZES} for name in clients}
        single: dict[str, dict[int, list[Rate]]] = {name: {size: [] for size in SIZES} for name in clients}
        hand_off: dict[int, list[float]] = {size: [] for size in SIZES}
        for number in range(rounds):
            for size in SIZES:
                say(f"round {number + 1} of {rounds}: parts of {size // MIB} MiB")
                raw[size].append(_raw_rate(facts["raw_port"], size))
                for name, client in clients.items():
                    rates[name][size].append(_fetch_rate(client, endpoint, tickets[size], size, THREADS))
                    single[name][size].append(_fetch_rate(client, endpoint, tickets[size], size, 1))
                if SHARED_MEMORY in clients:
                    hand_off[size].append(statistics.median(_hand_offs(clients[SHARED_MEMORY], endpoint, tickets[size])))
        for client in clients.values():
            client.close()
    return Figures(
        raw=_best(raw),
        rates={name: _best(of) for name, of in rates.items()},
        single={name: _best(of) for name, of in single.items()},
        hand_off_s={size: min(medians) for size, medians in hand_off.items() if medians},
        write_s={int(size): times["write_s"] for size, times in facts["writes"].items()},
        memcpy_s={int(size): times["memcpy_s"] for size, times in facts["writes"].items()},
        impossible=impossible,
    )


@contextlib.contextmanager
def _peer() -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "headrace.cli.bench.bench_peer", *map(str, SIZES)]
    with subprocess.Popen(
        ending_with_us(command, signal.SIGKILL), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        errors: list[str] = []
        drain = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
        drain.start()
        patience = threading.Timer(LONGEST_S, process.kill)
        patience.start()
        try:
            line = process.stdout.readline()
            if not line:
                process.wait()
                drain.join(1.0)
                raise UserError(f"the benchmark's preprocessor did not start: {(errors or ['no message'])[-1].strip()}")
            yield json.loads(line)
        except BaseException:
            process.kill()
            raise
        finally:
            process.stdin.close()
            process.wait()
            patience.cancel()


def _clients(endpoint: str, ticket: str) -> tuple[dict[str, PartClient], dict[str, str]]:
    """A client for each transport that is possible here, and why the others are not."""
    clients, impossible = {}, {}
    for name in TRANSPORTS:
        client = PartClient((name,))
        try:
            client.fetch(endpoint, ticket).delivery.release()
        except HeadraceError as err:
            impossible[name] = str(err)
            client.close()
        else:
            clients[name] = client
    return clients, impossible


def _raw_rate(port: int, num_bytes: int) -> Rate:
    """As many bytes in a call as by `_fetch_rate`: the luckiest of shorter ones would be luckier."""
    buffer = memoryview(bytearray(num_bytes))
    with socket.create_connection(("127.0.0.1", port), timeout=LONGEST_S) as connection:

        def receive() -> None:
            for _ in range(THREADS):
                connection.sendall(num_bytes.to_bytes(8, "little"))
                end = 0
                while end < num_bytes:
                    end += connection.recv_into(buffer[end:])

        return _rate(receive, THREADS * num_bytes)


def _fetch_rate(client: PartClient, endpoint: str, tickets: list[str], num_bytes: int, threads: int) -> Rate:
    with ThreadPoolExecutor(threads) as pool:

        def fetch(number: int) -> None:
            client.fetch(endpoint, tickets[number % len(tickets)]).delivery.release()

        return _rate(lambda: list(pool.map(fetch, range(threads))), threads * num_bytes)


def _rate(call: Callable[[], object], num_bytes: int) -> Rate:
    """Of the fastest call, after one that warms up; processor time of all of them."""
    call()
    calls = max(3, FETCHES * SIZES[-1] // num_bytes // 8)
    seconds, cpu = [], process_time()
    for _ in range(calls):
        begin = perf_counter()
        call()
        seconds.append(perf_counter() - begin)
    cpu = process_time() - cpu
    return Rate(bytes_per_s=num_bytes / min(seconds), cpu_s_per_gb=cpu / (calls * num_bytes / 1e9))


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
        size: Rate(bytes_per_s=max(r.bytes_per_s for r in of), cpu_s_per_gb=min(r.cpu_s_per_gb for r in of))
        for size, of in rates.items()
    }
