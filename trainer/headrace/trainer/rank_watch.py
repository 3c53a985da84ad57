"""The watch of every rank over the others: when one fails, hangs or falls silent, all end, and say why.

A rank that waits in a collective notices nothing by itself: gloo's waits cannot be ended from outside, and NCCL's only by
aborting its communicators. So a thread watches the side channel, and ends the process if the main thread does not.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import NoReturn, Self

import torch.distributed as dist

from headrace.errors import HeadraceError
from headrace.printable import printable
from headrace.trainer.communicators import abort_communicators
from headrace.trainer.hang_detection import ALARM_S, Patience, hung_job, silent_rank, who
from headrace.trainer.rank_progress import PROGRESS
from headrace.trainer.side_channel import SideChannel, agent_has_store

log = logging.getLogger(__name__)

_CHECK_S = 0.2
_GRACE_S = 1.0
"""From the news of a failure until the process is ended, unless its main thread ends by itself; how long that awaits an abort."""
_TELL_S = 2.0
"""How long a failed rank waits until its words are in the store."""
_HOST_S = 2.0
"""How long the host of the store stays for those who have not read yet."""
_KILL_S = 4
"""From the end of a failed rank's main thread until the kernel ends the process, whatever still waits in libraries."""
_LATE_S = 10.0
"""How long the ranks may take to come before it is said that they are waited for: some have to load torch first."""
_REMIND_S = 30.0
_EXIT_FAILURE = 1
_EXIT_INTERRUPTED = 130


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM."""


class RankWatch:
    """A context, entered by the main thread of each of several ranks, in which the end of one rank with an error ends all.

    If the block raises, the others are told, and this rank raises what failed first: its own error if that is a HeadraceError
    or came first, else HeadraceError with the words of the rank that it came from. If another rank fails, or the process gets
    SIGTERM or SIGINT, the block gets a second to raise by itself, and then the process ends. At the end of the block all ranks
    wait for each other.
    """

    def __init__(self, rank: int, num_ranks: int, patience: Patience) -> None:
        self._rank, self._num_ranks, self._patience = rank, num_ranks, patience
        self.channel = SideChannel(rank, num_ranks)
        self._ends = threading.Event()  # set once the main thread has left the block
        self._signals, self._wakeup = socket.socketpair()  # while the main thread waits in gloo, no handler runs
        self._alarmed_s = 0.0
        self._reminder_s = time.monotonic() + _LATE_S  # when to say next which ranks are waited for
        self._silent = threading.Lock()  # free until this rank has logged why the job ends

    def __enter__(self) -> Self:
        self._wakeup.setblocking(False)
        self._former_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._former_handler = signal.signal(signal.SIGTERM, self._terminate)
        threading.Thread(target=self._watch, name="rank watch", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._await_others()
        except BaseException as err:
            error = err
            raise
        finally:
            self._ends.set()
            first = ""
            if error is not None:
                first = self._tell(error)
                abort_communicators().join(_GRACE_S)  # after the telling, as an abort may wait
            self._close()
            if error is not None and _gives_way(error) and first != self._words(error):
                raise HeadraceError(first) from error

    def _await_others(self) -> None:
        """Wait until all ranks have trained all steps. Raises HeadraceError if one of them does not."""
        PROGRESS.begin("waits for the other ranks to end")
        self.channel.done()
        while (news := self.channel.news).num_done < self._num_ranks and not self._host_has_left():
            if why := news.failure or self._lost():
                raise HeadraceError(why)
            self.channel.await_news(_CHECK_S)

    def _tell(self, error: BaseException) -> str:
        """Tell the other ranks of this rank's error. Return in words what failed first, here or elsewhere, after logging it."""
        words = self._words(error)
        if _may_follow(error):
            self.channel.alarm(words)
            deadline = time.monotonic() + ALARM_S
            while not (why := self._why()) and time.monotonic() < deadline:
                self.channel.await_news(_CHECK_S)
            words = why or words
        first = self._settle(words)
        self._say(first)
        return first

    def _say(self, first: str) -> None:
        """Log why the job ends, whichever thread is first."""
        if self._silent.acquire(blocking=False):
            log.error("the job ends: %s", printable(first))

    def _settle(self, words: str) -> str:
        """Say why the job ends. Return what was said first, by this rank or another one."""
        self.channel.fail(words)
        deadline = time.monotonic() + _TELL_S
        while not (self.channel.news.failure or self.channel.news.lost) and time.monotonic() < deadline:
            self.channel.await_news(_CHECK_S)
        return self.channel.news.failure or words

    def _words(self, error: BaseException) -> str:
        report = PROGRESS.report()
        if isinstance(error, KeyboardInterrupt):
            what = "was told to end by SIGTERM" if isinstance(error, Terminated) else "was interrupted"
        else:
            what = str(error) if isinstance(error, HeadraceError) else repr(error)
        step = "" if report.step < 0 or what.startswith("step ") else f"step {report.step}: "
        return f"{who(self._rank, report)}: {step}{what}"

    def _close(self) -> None:
        """Leave the side channel; the host of the store waits for the others to have left."""
        if self.channel.news.failure:
            signal.alarm(_KILL_S)
        self._leave()
        signal.signal(signal.SIGTERM, self._former_handler)
        signal.set_wakeup_fd(self._former_wakeup)

    def _leave(self) -> None:
        self.channel.leave()
        deadline = time.monotonic() + _HOST_S
        while self.channel.hosts and (news := self.channel.news).num_gone < news.num_joined and time.monotonic() < deadline:
            self.channel.await_news(_CHECK_S)
        self.channel.close()

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        if not self._ends.is_set():
            raise Terminated

    # -- on the watching thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ends.is_set():
            ready, _, _ = select.select([self._signals], [], [], _CHECK_S)
            numbers = self._signals.recv(64) if ready else b""
            if signal.SIGTERM in numbers or signal.SIGINT in numbers:
                if not self._ends.wait(_GRACE_S):
                    self._tell(Terminated() if signal.SIGTERM in numbers else KeyboardInterrupt())
                    self._exit(_EXIT_INTERRUPTED)
            elif why := self._why():
                first = self._settle(why)
                abort_communicators()  # ends the main thread's wait
                if not self._ends.wait(_GRACE_S):
                    self._say(first)
                    self._exit(_EXIT_FAILURE)
            elif words := self._awaited():
                log.warning("waiting for other ranks: %s", words)

    def _awaited(self) -> str:
        """Return what is to be said now of ranks that have not come yet; empty if nothing is."""
        if time.monotonic() < self._reminder_s:
            return ""
        self._reminder_s = time.monotonic() + _REMIND_S
        return self.channel.waits_for

    def _exit(self, exit_code: int) -> NoReturn:
        """End the process while its main thread is in a wait that does not end."""
        self._leave()
        sys.stderr.flush()
        os._exit(exit_code)

    # -- on any thread ------------------------------------------------------------------------------------------------

    def _why(self) -> str:
        """Return why the job has to end, in words; empty if it has not."""
        news, now_s = self.channel.news, time.monotonic()
        if why := news.failure or self._lost():
            return why
        if news.alarm and not self._alarmed_s:
            self._alarmed_s = now_s
        if why := silent_rank(news.heard, now_s, self._patience, alarmed=bool(news.alarm)):
            return why
        if news.alarm and now_s - self._alarmed_s > ALARM_S:
            return news.alarm
        if self._rank == 0 and news.heard:
            reports = {0: PROGRESS.report()} | {rank: heard.report for rank, heard in news.heard.items()}
            return hung_job(reports, self._patience)
        return ""

    def _lost(self) -> str:
        """Return the loss of the store in words; empty if it is not lost."""
        news = self.channel.news
        if not news.exchanged_s or self._host_has_left():
            return ""
        silent_s = time.monotonic() - news.exchanged_s
        if not news.lost and silent_s <= self._patience.silence_s:
            return ""
        zero = news.heard.get(0)
        host = "that of torchrun's agent" if agent_has_store() else f"that of {who(0, None if zero is None else zero.report)}"
        how = f"has ended ({news.lost.splitlines()[0]})" if news.lost else f"has not answered for {silent_s:.0f} s"
        return f"the process that holds the ranks' store, {host}, {how}: its log may say why"

    def _host_has_left(self) -> bool:
        """Whether the rank that hosts the store has left behind this rank's last step, as it does once all have theirs."""
        news = self.channel.news
        return bool(news.lost) and self.channel.has_said_done and not (agent_has_store() or news.failure or news.alarm)


def _may_follow(error: BaseException) -> bool:
    """Whether an error may be the effect of another rank's end: an ended connection, as torch raises it, or SIGTERM."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError | Terminated)


def _gives_way(error: BaseException) -> bool:
    """Whether the words of the rank that failed first are raised in place of this rank's error."""
    return not isinstance(error, HeadraceError | KeyboardInterrupt)
