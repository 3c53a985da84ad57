"""A rank that sends what a recorded one sent, byte by byte, and the fields in which replies differ from the recorded ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from headrace.v1.jobs_pb2 import SubmitReply, SubmitRequest
from headrace.v1.sessions_pb2 import (
    CloseReply,
    CloseRequest,
    CommitReply,
    CommitRequest,
    OpenReply,
    PartLocation,
    PlanEvents,
    PlansRequest,
    RankPlan,
)
from tests.histories.history import at_hand, read_messages

TIMEOUT_S = 60.0


@dataclass(slots=True, kw_only=True)
class Replies:
    """All that a rank heard, apart from the order in which events of plans came, which is that of other processes' work."""

    submitted: Message
    opened: OpenReply
    plans: dict[int, RankPlan] = field(default_factory=dict)
    """By step. In the place of tickets are their parts, since tickets have the id of the job and a signature."""
    located: dict[str, PartLocation] = field(default_factory=dict)
    """By the part of the ticket. Of each the last one."""
    ended: list[Message] = field(default_factory=list)
    commits: list[Message] = field(default_factory=list)
    closed: list[Message] = field(default_factory=list)

    def take(self, message: bytes) -> None:
        """Take a message of events of plans in."""
        for event in PlanEvents.FromString(message).events:
            if event.HasField("plan"):
                for microbatch in event.plan.microbatches:
                    microbatch.tickets[:] = map(part, microbatch.tickets)
                self.plans[event.plan.step] = event.plan
            elif event.HasField("location"):
                event.location.ticket = part(event.location.ticket)
                self.located[event.location.ticket] = event.location
            else:
                self.ended.append(event.ended)

    def is_located(self, step: int) -> bool:
        """Whether the plan of a step and the places of all of its parts are known."""
        plan = self.plans.get(step)
        return plan is not None and all(one in self.located for microbatch in plan.microbatches for one in microbatch.tickets)


def part(ticket: str) -> str:
    """The part that a ticket names: GENERATION/STEP/REPLICA/MICROBATCH/NUMBER."""
    return ticket.split("/", 2)[2].rpartition(".")[0]


def recorded(file: Path) -> Replies:
    """What a recorded rank heard."""
    heard = Replies(
        submitted=SubmitReply.FromString(_said(file, "Jobs/Submit", by_client=False)[0]),
        opened=OpenReply.FromString(_said(file, "Sessions/Open", by_client=False)[-1]),
    )
    for message in _said(file, "Sessions/Plans", by_client=False):
        heard.take(message)
    heard.commits += map(CommitReply.FromString, _said(file, "Sessions/Commit", by_client=False))
    heard.closed += map(CloseReply.FromString, _said(file, "Sessions/Close", by_client=False))
    return heard


def replay(endpoint: str, file: Path) -> Replies:
    """Send to a service what a recorded rank sent, and return what it answers.

    Nothing is changed in the bytes but the path of data in the job's spec, and the id of the session, which the service draws. A
    commit is sent as soon as the step is planned and its parts are decoded.
    """
    with grpc.insecure_channel(endpoint) as channel:

        def call(method: str, request: bytes) -> bytes:
            answer: bytes = channel.unary_unary(f"/headrace.v1.{method}")(request, timeout=TIMEOUT_S)
            return answer

        spec = SubmitRequest.FromString(_said(file, "Jobs/Submit")[0])
        spec.spec_json = at_hand(spec.spec_json)
        submitted = SubmitReply.FromString(call("Jobs/Submit", spec.SerializeToString()))
        opened = OpenReply(waiting="not asked yet")
        while opened.waiting:
            opened = OpenReply.FromString(call("Sessions/Open", _said(file, "Sessions/Open")[-1]))
        heard = Replies(submitted=submitted, opened=opened)
        (plans,) = _said(file, "Sessions/Plans")
        asked = _of_session(PlansRequest, plans, opened.session)
        commits = [CommitRequest.FromString(message) for message in _said(file, "Sessions/Commit")]
        for message in channel.unary_stream("/headrace.v1.Sessions/Plans")(asked, timeout=TIMEOUT_S):
            heard.take(message)
            while commits and heard.is_located(commits[0].step):
                commit = _of_session(CommitRequest, commits.pop(0).SerializeToString(), opened.session)
                heard.commits.append(CommitReply.FromString(call("Sessions/Commit", commit)))
        assert not commits, "the plans have ended before all steps were committed"
        for message in _said(file, "Sessions/Close"):
            heard.closed.append(CloseReply.FromString(call("Sessions/Close", _of_session(CloseRequest, message, opened.session))))
    return heard


def differences(former: Message, now: Message, *, apart: Collection[str], later: Collection[str], at: str = "") -> Iterator[str]:
    """Yield the fields that two messages, or messages in them, have with other values, and these values.

    Fields in `apart`, named MESSAGE.FIELD, may differ; those in `later` may be missing in the former one.
    """
    for one in former.DESCRIPTOR.fields:
        name = f"{former.DESCRIPTOR.name}.{one.name}"
        told, tells = _value(former, one), _value(now, one)
        if name in apart or (name in later and not told):
            continue
        where = f"{at}{one.name}"
        if one.message_type is None or not (told and tells):
            if told != tells:
                yield f"{where}: {told!r} was told, now {tells!r}"
        elif not one.is_repeated:
            yield from differences(told, tells, apart=apart, later=later, at=f"{where}.")
        elif len(told) != len(tells):
            yield f"{where}: {len(told)} were told, now {len(tells)}"
        else:
            for n, (first, second) in enumerate(zip(told, tells, strict=True)):
                yield from differences(first, second, apart=apart, later=later, at=f"{where}[{n}].")


def _value(message: Message, one: Any) -> Any:
    """The value of a field: None where the message says nothing of it, a list of a repeated one."""
    if one.is_repeated:
        return list(getattr(message, one.name))
    return None if one.has_presence and not message.HasField(one.name) else getattr(message, one.name)


def _said(file: Path, method: str, *, by_client: bool = True) -> list[bytes]:
    return [one.message for one in read_messages(file) if one.method.endswith(f".{method}") and one.by_client == by_client]


def _of_session(kind: Any, message: bytes, session: str) -> bytes:
    request = kind.FromString(message)
    request.session = session
    written: bytes = request.SerializeToString()
    return written
