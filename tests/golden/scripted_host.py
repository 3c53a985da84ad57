"""A script's host of several ranks, which hear their plans and commit over one stream, as those of a real host do."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headrace.v1 import sessions_pb2
from tests.golden.scripted_rank import Rank, commit_answer
from tests.golden.world import Call, RefusedError, World


@dataclass(kw_only=True, eq=False)
class Host:
    """One host, with the sessions of its ranks."""

    world: World
    name: str
    ranks: dict[str, Rank] = field(default_factory=dict)
    """Session -> its rank."""
    news: list[str] = field(default_factory=list)
    """What came over the stream, in words, since it was last asked for."""
    _answers: dict[tuple[str, int], asyncio.Future[str]] = field(default_factory=dict)
    _requests: asyncio.Queue[sessions_pb2.RelayRequest | None] = field(default_factory=asyncio.Queue)

    def connect(self) -> None:
        """Open the stream."""
        self._stream = asyncio.create_task(self._listen())

    def end(self) -> None:
        """End the stream, as with the process that holds it."""
        self._requests.put_nowait(None)

    def listen(self, rank: Rank) -> None:
        """Read the plans of a rank's session from now on."""
        self.ranks[rank.session] = rank
        self._requests.put_nowait(sessions_pb2.RelayRequest(listen=[rank.session]))

    async def commit(self, request: sessions_pb2.CommitRequest) -> str:
        """Commit a step for a rank; return the answer in words."""
        answer = self._answers[request.session, request.step] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(sessions_pb2.RelayRequest(commits=[request]))
        return await answer

    async def _messages(self) -> AsyncIterator[sessions_pb2.RelayRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _listen(self) -> None:
        try:
            async for message in self.world.sessions.Relay(self._messages(), Call()):
                self._hear(sessions_pb2.RelayReply.FromString(message))
        except RefusedError as err:
            self.news.append(f"host {self.name}: {err}")

    def _hear(self, reply: sessions_pb2.RelayReply) -> None:
        for item in reply.events:
            ranks = [self.ranks[session] for session in item.sessions]
            told = [rank.hear(zlib.decompress(item.events) if item.compressed else item.events) for rank in ranks]
            who = ", ".join(str(rank.rank) for rank in ranks)
            self.news.extend(f"host {self.name} for rank {who}: {line}" for line in told[0])
        for end in reply.ends:
            self.ranks[end.session].news.append(end.error or "no plans follow")
        for answer in reply.commits:
            for session in answer.sessions:
                text = answer.error or commit_answer(answer.step, answer.reply)
                self._answers.pop((session, answer.step)).set_result(text)
