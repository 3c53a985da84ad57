"""A reorder service on a real socket that says what a test says, and parts for a real preprocessor: the loader's world."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.sample import SCHEMA
from headrace.spec import parse_spec
from headrace.v1 import common_pb2, sessions_pb2, sessions_pb2_grpc

SPEC = parse_spec({"name": "job", "sources": [{"path": "/d"}], "window": 4})


class World(sessions_pb2_grpc.SessionsServicer):
    """`tell` sends events to the present session; a new session is told all of them again."""

    def __init__(self, producer: Any = None) -> None:
        """`producer`: of payload_world, with the parts of `step`. None: a test says where parts are."""
        self.producer = producer
        self.session = ""
        self.next_step = 0
        self.opens = 0
        self.lost: list[tuple[str, str]] = []
        self.commits: list[int] = []
        self.complete = True
        """Whether a commit is the last of its step."""
        self.withheld: set[str] = set()
        """Tickets that `step` gives the preprocessor no lease on."""
        self.deaf = False
        """Whether reports of lost parts find no session."""
        self.forgetful = False
        """Whether commits find no session, though streams of plans do."""
        self.answers = threading.Event()
        """Set: commits are answered; they wait for it."""
        self.answers.set()
        self.refuses = False
        """Whether commits are in conflict with what the service has."""
        self.totals: dict[str, float] = {}
        """What plans say of a whole step; nothing, as an old service says nothing."""
        self.changed = threading.Condition()
        self._told: list[sessions_pb2.PlanEvent] = []
        self._streams: dict[str, queue.Queue[Any]] = {}
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.http2.min_ping_interval_without_data_ms", 1_000)])
        sessions_pb2_grpc.add_SessionsServicer_to_server(self, self._server)
        servicer = health.HealthServicer()
        servicer.set("headrace.v1.Jobs", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        for stream in self._streams.values():
            stream.put(grpc.StatusCode.UNAVAILABLE)
        self._server.stop(0).wait()
        if self.producer is not None:
            self.producer.stop()

    def wait(self, condition: Callable[[], Any]) -> None:
        """Until it holds: asked again at every call, and every few milliseconds for what the preprocessor does."""
        deadline = time.monotonic() + 10
        with self.changed:
            while not self.changed.wait_for(condition, timeout=0.005):
                assert time.monotonic() < deadline

    @property
    def fetched(self) -> list[str]:
        """Tickets of the parts that the preprocessor has delivered."""
        entries = self.producer.call(lambda: list(self.producer.store._entries.values()))
        return [entry.ticket for entry in entries if entry.delivered]

    # -- what a test says ---------------------------------------------------------------------------------------------

    def tell(self, *events: sessions_pb2.PlanEvent) -> None:
        self._told += events
        for event in events:
            if self.session:
                self._streams[self.session].put(event)

    def forget_sessions(self) -> None:
        """As a restart does: streams break, and nobody knows the session any more."""
        former, self.session = self.session, ""
        self._streams[former].put(grpc.StatusCode.UNAVAILABLE)

    def plan(self, step: int, *microbatches: list[str]) -> sessions_pb2.PlanEvent:
        """Also tells nothing of places: see `place`."""
        messages = [
            sessions_pb2.RankMicrobatch(replica=0, index=k, tickets=tickets, num_samples=len(tickets))
            for k, tickets in enumerate(microbatches)
        ]
        return sessions_pb2.PlanEvent(plan=sessions_pb2.RankPlan(step=step, microbatches=messages, num_samples=9, **self.totals))

    def place(self, ticket: str, lease: str = "lease-1", endpoint: str = "") -> sessions_pb2.PlanEvent:
        """At our own preprocessor, unless told otherwise."""
        location = sessions_pb2.PartLocation(ticket=ticket, lease=lease, endpoint=endpoint or self.producer.endpoint)
        return sessions_pb2.PlanEvent(location=location)

    def hold(self, *tickets: str) -> None:
        """The preprocessor gets leases on these parts. The sample of ticket S/K has the id 100 S + K."""
        for ticket in tickets:
            step, _, k = ticket.partition("/")
            self.producer.add(ticket, make_part(100 * int(step) + int(k)), step=int(step))

    def step(self, index: int, num_microbatches: int = 2) -> None:
        """A step of one part a microbatch, all placed, and held but for those `withheld`."""
        tickets = [f"{index}/{k}" for k in range(num_microbatches)]
        self.hold(*(ticket for ticket in tickets if ticket not in self.withheld))
        self.tell(self.plan(index, *([ticket] for ticket in tickets)), *map(self.place, tickets))

    def end(self, message: str = "") -> None:
        self.tell(sessions_pb2.PlanEvent(ended=sessions_pb2.JobEnded(message=message)))

    # -- what the loader asks -----------------------------------------------------------------------------------------

    def Open(self, request: sessions_pb2.OpenRequest, context: grpc.ServicerContext) -> sessions_pb2.OpenReply:  # noqa: N802
        with self.changed:
            if self.session:
                self._streams[self.session].put(grpc.StatusCode.ABORTED)
            self.opens += 1
            self.session = f"job/{request.rank}/{self.opens}"
            self._streams[self.session] = queue.Queue()
            for event in self._told:
                self._streams[self.session].put(event)
            self.changed.notify_all()
        return sessions_pb2.OpenReply(
            session=self.session,
            generation=1,
            next_step=self.next_step,
            spec_json=SPEC.to_json(),
            vocabulary=common_pb2.Vocabulary(size=16, image_token=1, audio_token=2),
        )

    def Plans(  # noqa: N802
        self, request: sessions_pb2.PlansRequest, context: grpc.ServicerContext
    ) -> Iterator[sessions_pb2.PlanEvents]:
        self._check(request.session, context)
        while not isinstance(event := self._streams[request.session].get(), grpc.StatusCode):
            yield sessions_pb2.PlanEvents(events=[event])
        context.abort(event, "the test says so")

    def ReportLost(  # noqa: N802
        self, request: sessions_pb2.ReportLostRequest, context: grpc.ServicerContext
    ) -> sessions_pb2.ReportLostReply:
        self._check(request.session, context)
        with self.changed:
            self.lost.append((request.ticket, request.lease))
            self.changed.notify_all()
        if self.deaf:
            context.abort(grpc.StatusCode.NOT_FOUND, "no session")
        return sessions_pb2.ReportLostReply()

    def Commit(  # noqa: N802
        self, request: sessions_pb2.CommitRequest, context: grpc.ServicerContext
    ) -> sessions_pb2.CommitReply:
        self._check(request.session, context)
        if self.forgetful:
            context.abort(grpc.StatusCode.NOT_FOUND, "no session")
        self.answers.wait(10)
        if self.refuses:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the test refuses commits")
        with self.changed:
            self.commits.append(request.step)
            self.changed.notify_all()
        return sessions_pb2.CommitReply(committed=self.complete, missing=() if self.complete else [1])

    def Close(self, request: sessions_pb2.CloseRequest, context: grpc.ServicerContext) -> sessions_pb2.CloseReply:  # noqa: N802
        return sessions_pb2.CloseReply()

    def _check(self, session: str, context: grpc.ServicerContext) -> None:
        if session != self.session:
            known = grpc.StatusCode.ABORTED if self.session else grpc.StatusCode.NOT_FOUND
            context.abort(known, f"session {session} is not the present one")


def make_part(sample_id: int, placeholders: Sequence[int] = ()) -> pa.RecordBatch:
    """One sample with an image of four patches and a recording of three frames, all values sample_id % 256, whose one target
    weighs sample_id / 8. placeholders: what stands for the media in front of its two words."""
    patches, mel = np.full(4 * 588, sample_id % 256, np.uint8), np.full(3 * 128, sample_id % 256, np.float16)
    before = len(placeholders)
    row: dict[str, Any] = {"sample_id": sample_id, "input_ids": [*placeholders, 5, 6], "labels": [-100] * (before + 1) + [6]}
    row |= {"patches": patches, "image_grids": [[1, 2, 2]], "mel": mel, "mel_frames": [3]}
    row |= {"target_weights": [0] * (before + 1) + [sample_id / 8], "flags": 0}
    return pa.RecordBatch.from_pylist([row], schema=SCHEMA)
