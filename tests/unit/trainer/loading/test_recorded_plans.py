"""A former release's leader at a trainer of today: its recorded replies and plans are followed to the end (tests/histories)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from headrace import trainer
from headrace.message_codec import plan_value
from headrace.spec import load_spec_json
from headrace.v1 import jobs_pb2, sessions_pb2
from tests.histories.history import Said, histories, read_messages
from tests.histories.newer import with_a_field_more
from tests.unit.proto.transport import payload_world
from tests.unit.trainer.loading import loader_world

recorded = pytest.mark.parametrize("folder", histories("rank.jsonl"))
of_any_release = pytest.mark.parametrize(
    "alter", [lambda message: None, with_a_field_more], ids=["as recorded", "with a field more"]
)


def said(file: Path, method: str, *, by_client: bool = False) -> list[Said]:
    return [one for one in read_messages(file) if one.method.endswith(f".{method}") and one.by_client == by_client]


def submitted(file: Path) -> Any:
    """The spec with which the recorded job was submitted."""
    (request,) = said(file, "Jobs/Submit", by_client=True)
    return load_spec_json(jobs_pb2.SubmitRequest.FromString(request.message).spec_json)


def plans(file: Path) -> list[sessions_pb2.PlanEvents]:
    return [sessions_pb2.PlanEvents.FromString(one.message) for one in said(file, "Sessions/Plans")]


class RecordedLeader(loader_world.World):
    """Opens a session and tells plans as a recorded leader did; parts lie at a preprocessor of the test's."""

    def __init__(self, file: Path, alter: Callable[[Message], None]) -> None:
        super().__init__(payload_world.Producer(16 << 20, shared=False))
        self._reply = sessions_pb2.OpenReply.FromString(said(file, "Sessions/Open")[-1].message)
        alter(self._reply)
        self.samples: list[int] = []
        for events in plans(file):
            for event in events.events:
                if event.HasField("location"):
                    event.location.endpoint = self.producer.endpoint
                elif event.HasField("plan"):
                    self._hold(event.plan)
                alter(event)
                self.tell(event)

    def _hold(self, plan: sessions_pb2.RankPlan) -> None:
        for ticket in (ticket for microbatch in plan.microbatches for ticket in microbatch.tickets):
            self.samples.append(len(self.samples))
            self.producer.add(ticket, loader_world.make_part(self.samples[-1]), step=plan.step)

    def Open(self, request: sessions_pb2.OpenRequest, context: grpc.ServicerContext) -> sessions_pb2.OpenReply:  # noqa: N802
        reply = sessions_pb2.OpenReply()
        reply.CopyFrom(self._reply)
        reply.session = super().Open(request, context).session
        return reply


@of_any_release
@recorded
def test_plans_of_an_old_leader_are_taken_and_committed(folder: Path, alter: Callable[[Message], None]) -> None:
    world = RecordedLeader(folder / "rank.jsonl", alter)
    found = []
    try:
        with trainer.connect(world.endpoint, job="rank") as loader:
            for step in loader:
                found += [sample for microbatch in step for sample in microbatch.data.sample_ids.tolist()]
                loader.commit(step)
            assert loader.spec == submitted(folder / "rank.jsonl")
    finally:
        world.stop()
    assert sorted(found) == world.samples
    assert world.commits == list(range(len(world.commits)))
    assert world.commits


@of_any_release
@recorded
def test_whole_plans_of_an_old_leader_name_every_sample_once_in_every_unit(
    folder: Path, alter: Callable[[Message], None]
) -> None:
    file = folder / "pipeline.jsonl"
    spec, steps = submitted(file), []
    for event in (event for events in plans(file) for event in events.events if event.HasField("plan")):
        alter(event)
        plan = plan_value(event.plan.whole)
        steps.append(event.plan.step)
        assert plan.topology == spec.topology.topology()
        plan.check()
        assert len(plan.sample_ids()) == event.plan.num_samples
    assert sorted(steps) == list(range(spec.steps))
