"""A trainer's place in its job, as it stands in a checkpoint beside the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from headrace.errors import ConflictError
from headrace.manifest import Vocabulary
from headrace.message_codec import vocabulary_value
from headrace.peer_spec import load_peer_spec_json
from headrace.spec import JobSpec
from headrace.v1 import sessions_pb2

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """Which steps of a job a model has applied, and which samples the last of them had."""

    job: str
    generation: int = 0
    step: int | None = None
    """The first step that the model has not applied; None: that behind the job's last commit, whatever the model has applied."""
    content: int = 0
    """`RankPlan.content` of the step before, by which the service recognises a state of its job; 0: unknown."""

    @classmethod
    def of(cls, state: Mapping[str, Any], job: str) -> Self:
        """Return the state that `to_dict` has written. Raises ConflictError where it is of another job or version."""
        if state.get("version") != STATE_VERSION or state.get("job") != job:
            raise ConflictError(
                f"the state is of job {state.get('job')!r}, version {state.get('version')}; "
                f"this loader is of job {job!r}, version {STATE_VERSION}"
            )
        return cls(job=job, generation=state["generation"], step=state["step"], content=state.get("content", 0))

    def to_dict(self) -> dict[str, Any]:
        return {"version": STATE_VERSION, **asdict(self)}

    def message(self) -> sessions_pb2.TrainerState:
        return sessions_pb2.TrainerState(step=self.step, content=self.content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session that was opened."""

    spec: JobSpec
    vocabulary: Vocabulary
    generation: int
    next_step: int
    """The first step that is not committed."""
    state: LoaderState
    """The state from which the rank goes on. It may be of a later step than `next_step`: those between are committed again."""

    @classmethod
    def of(cls, reply: sessions_pb2.OpenReply, job: str, states: Sequence[LoaderState]) -> Self:
        """Return what a reply says to a rank that has offered `states`; a service of release 0.1 does not name the state."""
        begin = max((state.step or 0 for state in states), default=0)
        state = reply.state if reply.HasField("state") else sessions_pb2.TrainerState(step=max(reply.next_step, begin))
        return cls(
            spec=load_peer_spec_json(reply.spec_json),
            vocabulary=vocabulary_value(reply.vocabulary),
            generation=reply.generation,
            next_step=reply.next_step,
            state=LoaderState(job=job, generation=reply.generation, step=state.step, content=state.content),
        )
