"""A reorder service and a preprocessor on real sockets that do what a test says: the loader's world, without a planner."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pyarrow as pa
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.sample import SCHEMA
from headrace.spec import parse_spec
from headrace.v1 import common_pb2, payload_pb2, payload_pb2_grpc, sessions_pb2, sessions_pb2_grpc

SPEC = parse_spec({"name": "job", "sources": [{"path": "/d"}], "window": 4})


class World(sessions_pb2_grpc.SessionsServicer, payload_pb2_grpc.PayloadServicer):
    """Both services on one port. `tell` sends events to the present session; a new session is told all of them again."""

    def __init__(self) -> None:
        self.session = ""
        self.next_step = 0
        self.opens = 0
        self.fetched: list[str] = []
        self.lost: list[tuple[str, str]] = []
        self.commits: list[int] = []
        self.complete = True
        """Whether a commit is the last of its step."""
        self.refused: set[str] = set()
        """Tickets that are not held."""
        self.deaf = False
        """Whether reports of lost parts find no session."""
        self.changed = threading.Condition()
        self._told: list[sessions_pb2.PlanEvent] = []
        self._streams: dict[str, queue.Queue[Any]] = {}
        self._server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.http2.min_ping_interval_without_data_ms", 1_000)])
        sessions_pb2_grpc.add_SessionsServicer_to_server(self, self._server)
        payload_pb2_grpc.add_PayloadServicer_to_server(self, self._server)
        servicer = health.HealthServicer()
        servicer.set("headrace.v1.Jobs", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        for stream in self._streams.values():
            stream.put(grpc.StatusCode.UNAVAILABLE)
        self._server.stop(0).wait()

    def wait(self, condition: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=10)

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
        return sessions_pb2.PlanEvent(plan=sessions_pb2.RankPlan(step=step, microbatches=messages, num_samples=9))

    def place(self, ticket: str, lease: str = "lease-1", endpoint: str = "") -> sessions_pb2.PlanEvent:
        """At our own port, unless told otherwise."""
        location = sessions_pb2.PartLocation(ticket=ticket, lease=lease, endpoint=endpoint or self.endpoint)
        return sessions_pb2.PlanEvent(location=location)

    def step(self, index: int, num_microbatches: int = 2) -> None:
        """A step of one part a microbatch, all placed. The sample of ticket S/K has the id 100 S + K."""
        tickets = [f"{index}/{k}" for k in range(num_microbatches)]
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
    ) -> Iterator[sessions_pb2.PlanEvent]:
        self._check(request.session, context)
        while not isinstance(event := self._streams[request.session].get(), grpc.StatusCode):
            yield event
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
        with self.changed:
            self.commits.append(request.step)
            self.changed.notify_all()
        return sessions_pb2.CommitReply(committed=self.complete)

    def Close(self, request: sessions_pb2.CloseRequest, context: grpc.ServicerContext) -> sessions_pb2.CloseReply:  # noqa: N802
        return sessions_pb2.CloseReply()

    def Offer(  # noqa: N802
        self, request: payload_pb2.OfferRequest, context: grpc.ServicerContext
    ) -> payload_pb2.OfferReply:
        return payload_pb2.OfferReply()

    def Fetch(  # noqa: N802
        self, request: payload_pb2.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[payload_pb2.FetchReply]:
        with self.changed:
            self.fetched.append(request.ticket)
            self.changed.notify_all()
        if request.ticket in self.refused:
            context.abort(grpc.StatusCode.NOT_FOUND, "not held")
        step, _, k = request.ticket.partition("/")
        data = _part(100 * int(step) + int(k))
        yield payload_pb2.FetchReply(header=payload_pb2.PartHeader(num_bytes=len(data), num_samples=1))
        for start in range(0, len(data), 100):
            yield payload_pb2.FetchReply(chunk=data[start : start + 100])

    def _check(self, session: str, context: grpc.ServicerContext) -> None:
        if session != self.session:
            known = grpc.StatusCode.ABORTED if self.session else grpc.StatusCode.NOT_FOUND
            context.abort(known, f"session {session} is not the present one")


def _part(sample_id: int) -> bytes:
    row = {"sample_id": sample_id, "input_ids": [5, 6], "labels": [-100, 6], "patches": [], "image_grids": []}
    row |= {"mel": [], "mel_frames": [], "flags": 0}
    batch = pa.RecordBatch.from_pylist([row], schema=SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())
