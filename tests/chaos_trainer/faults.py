"""Where a node is struck, and how. Pure: knows neither torch nor processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self


class Place(StrEnum):
    """What a node is about to do when it is struck, in the order of a step, and then of a recovery."""

    BEGIN = "begin"
    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECEIVE = "receive"
    BROKER = "broker"
    """A message between two units."""
    GRADIENTS = "gradients"
    """The sum over the pipelines of one bucket."""
    VOTE = "vote"
    VOTING = "voting"
    """Its vote is under way."""
    VOTED = "voted"
    """All others may know the outcome."""
    UPDATE = "update"
    """It knows the outcome."""
    UPDATED = "updated"
    COMPARE = "compare"
    """Its weights with those of the other nodes that have them."""
    EVALUATE = "evaluate"
    """A step of an evaluation that follows the step."""
    COMMIT = "commit"
    COMMITTED = "committed"
    CONNECT = "connect"
    AGREE = "agree"
    MOVE = "move"
    MOVING = "moving"
    """What it sends is under way."""
    BARRIER = "barrier"
    GROUPS = "groups"
    """One of the groups of a new generation."""
    SAVE = "save"
    SAVED = "saved"
    """What it has is written."""
    PUBLISH = "publish"
    """All have written: the first node gives the checkpoint its name."""


RECOVERY = (Place.CONNECT, Place.AGREE, Place.MOVE, Place.MOVING, Place.BARRIER, Place.GROUPS)
SAVING = (Place.SAVE, Place.SAVED, Place.PUBLISH)
OUTSIDE = RECOVERY + SAVING
"""Places that belong to no step."""


class Kind(StrEnum):
    """How."""

    KILL = "kill"
    STOP = "stop"
    HOLD = "hold"
    """It waits for a snapshot that is newer than its generation."""
    MISS = "cut off"
    """It lives, but its connections to other nodes end: what has come over them just now counts as lost."""
    CUT = "disconnect"
    """It lives, but its connections to other nodes end, and nobody says why."""
    DRIFT = "change a weight"
    """A bit of the first weight of its memory is another one from then on."""
    LEAVE = "leave"
    """SIGTERM: the node ends at the end of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place of a node in the pipelines of a generation, or its rank there, or its name; nothing: whoever comes first."""

    node: str = ""
    rank: int | None = None
    pipeline: int = 0
    unit: str = ""
    stage: int = 0
    """-1: the unit's last one."""

    def __str__(self) -> str:
        if self.unit:
            return f"{self.unit} {self.stage} of pipeline {self.pipeline}"
        return self.node or ("the first node" if self.rank is None else f"rank {self.rank}")

    def is_at(self, node: str, rank: int, pipeline: int, unit: str, stage: int, num_stages: int) -> bool:
        """Whether that is the node."""
        if not self.unit:
            return self.node in ("", node) and self.rank in (None, rank)
        return (pipeline, unit, stage) == (self.pipeline, self.unit, self.stage % num_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """It strikes once, from `generation` on, whoever comes to its place first."""

    place: Place
    where: Where
    kind: Kind = Kind.KILL
    step: int | None = 2
    """None: any; of no meaning outside of steps."""
    occurrence: int = 1
    """The how many-th time, within the step or the recovery, that the node comes there."""
    generation: int = 1
    lasts_s: float | None = None
    """Of a stop; None: to the end of the job."""
    leader: bool = False
    """Whether the reorder service that leads is killed in the same moment."""

    def __str__(self) -> str:
        when = f"generation {self.generation}" if self.place in OUTSIDE else f"step {self.step}"
        lasts = f" for {self.lasts_s:g} s" if self.lasts_s is not None else ""
        with_leader = " with the leader" if self.leader else ""
        return f"{self.kind} {self.where} at {self.place} {self.occurrence} of {when}{lasts}{with_leader}"

    @property
    def is_loss(self) -> bool:
        """Whether the others miss the node."""
        return self.kind == Kind.KILL or (self.kind == Kind.STOP and (self.lasts_s is None or self.lasts_s >= 1))

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def of_dict(cls, fields: dict[str, Any]) -> Self:
        """What `to_dict` gave."""
        fields = {**fields, "place": Place(fields["place"]), "kind": Kind(fields["kind"])}
        return cls(**{**fields, "where": Where(**fields["where"])})


def num_losses(faults: Iterable[Fault]) -> int:
    """At most so many steps are begun again."""
    return sum(fault.is_loss for fault in faults)
