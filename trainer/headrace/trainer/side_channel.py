"""The side channel between the ranks of a job: a store over which they say that they live and why they end.

It is torch's TCPStore: that of torchrun's agent, or rank 0's own where another launcher started the ranks.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from headrace.errors import UserError
from headrace.launcher_variables import meeting_place
from headrace.trainer.rank_progress import PROGRESS, ProgressReport

BEAT_S = 0.5
"""Pause between two exchanges of a rank with the store, each of two requests."""
MEET_TIMEOUT = timedelta(minutes=30)
"""How long a rank looks for the store, and for each request that waits for a key."""

_FAILURE, _ALARM, _JOINED, _DONE, _GONE, _RANKS = "failure", "alarm", "joined", "done", "gone", "ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What was heard last of a rank."""

    report: ProgressReport
    beat: int
    """Number of that report."""
    since_s: float
    """When it came here, in this process's monotonic seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What the ranks have told each other so far, as of the last exchange with the store."""

    failure: str = ""
    """Why the job ends; empty while it does not. The first rank that says it decides."""
    alarm: str = ""
    """An error that may follow from the end of another rank; the first one that was raised."""
    num_joined: int = 0
    """Ranks that were ever here."""
    num_done: int = 0
    """Ranks that have trained all steps."""
    num_gone: int = 0
    """Ranks that need the store no more."""
    heard: Mapping[int, Heard] = field(default_factory=dict)
    """By rank: on rank 0 all others, on the others rank 0."""
    exchanged_s: float = 0.0
    """When the last exchange ended, in monotonic seconds; 0 before the first one."""
    lost: str = ""
    """Why the store cannot be reached any more; empty while it can."""


class SideChannel:
    """One rank's end of the side channel. A thread of its own exchanges with the store, since each request may wait for ever."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._place = meeting_place()
        self._heeded = range(1, num_ranks) if rank == 0 else (0,)
        self.hosts = rank == 0 and not agent_has_store()
        """Whether the store lives in this process."""
        self.news = News()
        """Replaced as a whole after each exchange."""
        self.has_said_done = False
        """Whether the store has it that this rank has trained all steps."""
        self._store: Store | None = None
        self._refusal: UserError | None = None
        self._connected = threading.Event()
        self._said: dict[str, str] = {}  # words to be written, by key
        self._counts: list[str] = [_JOINED]  # counters to be raised by one
        self._changed = threading.Condition()  # guards the two above
        self._exchanged = threading.Condition()
        self._beats = 0
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="side channel", daemon=True)
        self._thread.start()

    def store(self) -> Store:
        """Return a connection to the store for torch.distributed, once there is one.

        Raises UserError if this rank cannot host it, or was told of another number of ranks than others, and DistNetworkError if
        there is none.
        """
        self._connected.wait()
        if self._refusal is not None:
            raise self._refusal
        if self._store is None:
            raise dist.DistNetworkError(self.news.lost)
        return self._store

    def fail(self, words: str) -> None:
        """Say why the job ends, unless another rank has."""
        self._say(_FAILURE, words)

    def alarm(self, words: str) -> None:
        """Say an error that may follow from the end of another rank."""
        self._say(_ALARM, words)

    def done(self) -> None:
        """Say that this rank has trained all steps."""
        self._count(_DONE)

    def leave(self) -> None:
        """Say that this rank needs the store no more."""
        self._count(_GONE)

    def await_news(self, timeout_s: float) -> None:
        """Wait for the next exchange, for at most `timeout_s`."""
        with self._exchanged:
            self._exchanged.wait(timeout_s)

    @property
    def waits_for(self) -> str:
        """What keeps the ranks from beginning, and the remedy, in words; empty once all are here."""
        host, port = self._place
        if self.news.num_joined == self._num_ranks or self.news.lost:
            return ""
        if self._store is None:
            return f"nobody answers at {host}:{port}, where rank 0 is to be: start it, with the same MASTER_ADDR and MASTER_PORT"
        return (
            f"{self.news.num_joined} of {self._num_ranks} ranks are at {host}:{port}: start the others with the same "
            "MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and a RANK of their own, as torchrun does"
        )

    def close(self) -> None:
        """End the thread after a last exchange."""
        self._ends = True
        with self._changed:
            self._changed.notify_all()
        self._thread.join(BEAT_S)

    def _say(self, key: str, words: str) -> None:
        with self._changed:
            self._said.setdefault(key, words)
            self._changed.notify_all()

    def _count(self, key: str) -> None:
        with self._changed:
            self._counts.append(key)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            store = self._meet()
            clone = store.clone()  # type: ignore[attr-defined]  # a connection's requests wait for each other
            attempt = _attempt()
            self._store, own = PrefixStore(attempt, store), PrefixStore(f"{attempt}/side channel", clone)
            self._refusal = self._odd_number(own)
            self._connected.set()
            for key in (_FAILURE, _ALARM):
                own.compare_set(key, "", "")
            for key in (_JOINED, _DONE, _GONE):
                own.add(key, 0)
            while not self._ends:
                self._exchange(own)
                with self._changed:
                    if not (self._ends or self._said or self._counts):
                        self._changed.wait(BEAT_S)
            self._exchange(own)
        except UserError as err:
            self._refusal, self.news = err, replace(self.news, lost=str(err))
            self._connected.set()
            self._notify()
        except Exception as err:  # of any kind: whoever watches takes it for the loss of the store
            self.news = replace(self.news, lost=str(err) or repr(err))
            self._connected.set()
            self._notify()

    def _meet(self) -> TCPStore:
        """Return a connection to the store, which rank 0 hosts. Raises UserError where it cannot."""
        host, port = self._place
        try:
            return TCPStore(
                host,
                port,
                self._num_ranks,
                self.hosts,
                timeout=MEET_TIMEOUT,
                wait_for_workers=False,
                multi_tenant=self.hosts,
            )
        except dist.DistNetworkError as err:
            if not self.hosts or "EADDRINUSE" not in str(err):
                raise
            raise UserError(
                f"rank 0 cannot listen at {host}:{port}, where the ranks meet, as that port is taken: give all ranks another "
                "MASTER_PORT (torchrun: --master-port); if another process of this job has it, give each a RANK of its own"
            ) from err

    def _odd_number(self, store: Store) -> UserError | None:
        """Return the error of a rank that was told of another number of ranks than the first one that came, if it was."""
        said = store.compare_set(_RANKS, "", str(self._num_ranks)).decode()
        if said == str(self._num_ranks):
            return None
        return UserError(
            f"this rank was started with WORLD_SIZE {self._num_ranks}, and another one with WORLD_SIZE {said}: start all ranks "
            "with the same"
        )

    def _exchange(self, store: Store) -> None:
        with self._changed:
            said, counts = self._said, self._counts
            self._said, self._counts = {}, []
        former, self._beats = self.news.heard, self._beats + 1
        store.set(_beat(self._rank), json.dumps([self._beats, asdict(PROGRESS.report())]))
        for key, words in said.items():
            store.compare_set(key, "", words)
        for key in counts:
            store.add(key, 1)
            self.has_said_done |= key == _DONE
        keys = [_FAILURE, _ALARM, _JOINED, _DONE, _GONE]
        failure, alarm, *numbers = (value.decode() for value in store.multi_get(keys))
        joined, done, gone = map(int, numbers)
        heard = {}
        if joined == self._num_ranks:  # each has told its first beat before it counted itself
            beats = store.multi_get([_beat(rank) for rank in self._heeded])
            heard = {rank: _heard(value, former.get(rank)) for rank, value in zip(self._heeded, beats, strict=True)}
        self.news = News(
            failure=failure,
            alarm=alarm,
            num_joined=joined,
            num_done=done,
            num_gone=gone,
            heard=heard,
            exchanged_s=time.monotonic(),
        )
        self._notify()

    def _notify(self) -> None:
        with self._exchanged:
            self._exchanged.notify_all()


def agent_has_store() -> bool:
    """Whether the store is that of torchrun's agent, which outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _attempt() -> str:
    """Return a prefix of the keys of this start of the job: the agent's store still has those of starts before a restart.

    torchrun numbers the restarts of each node by failures of its own ranks, which all ranks' ends are where one fails.
    """
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if agent_has_store() else '0'}"


def _beat(rank: int) -> str:
    return f"beat {rank}"


def _heard(value: bytes, former: Heard | None) -> Heard:
    beat, report = json.loads(value)
    if former is not None and former.beat == beat:
        return former
    return Heard(report=ProgressReport(**report), beat=beat, since_s=time.monotonic())
