"""Which nodes of a recoverable job are there, and when that makes a new snapshot of their pipelines.

Pure: it is told what happens, and when. The streams, the store and the clock are in headrace.reorder_service.nodes.nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from google.protobuf.json_format import MessageToDict, ParseDict  # type: ignore[import-untyped]

from headrace.errors import ConflictError
from headrace.reorder_service.nodes.snapshots import Change, Successor
from headrace.snapshot import is_rerouted
from headrace.v1.membership_pb2 import NodesSpec, Snapshot

LEASE_S = 1.0  # a node that says nothing for so long is lost: three heartbeats
REJOIN_S = 3.0  # how long a new leader waits for the nodes of the former one: a client tries again at least once a second


@dataclass(slots=True, kw_only=True)
class Member:
    """A node that is there."""

    address: str
    heard_s: float
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What must survive of a membership."""

    spec: NodesSpec
    snapshot: Snapshot
    since: Mapping[str, int] = field(default_factory=dict)
    """The generation with which each of its nodes came in: one that follows none since then has nothing of the model."""
    job_generation: int
    """Of the job (its resets and topologies), when the membership began."""

    def to_json(self) -> str:
        """For the store."""
        spec, snapshot = MessageToDict(self.spec), MessageToDict(self.snapshot)
        fields = {"spec": spec, "snapshot": snapshot, "since": self.since, "job_generation": self.job_generation}
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def of_json(cls, document: str) -> Record:
        """What `to_json` has written."""
        fields = json.loads(document)
        return cls(
            spec=ParseDict(fields["spec"], NodesSpec()),
            snapshot=ParseDict(fields["snapshot"], Snapshot()),
            since=fields["since"],
            job_generation=fields["job_generation"],
        )


@dataclass(slots=True)
class Membership:
    """The nodes of one job.

    Whoever is in the newest snapshot and not there is lost; whoever is there and not in it joins. `take_change` says so, for
    all that happened since; `adopt` takes up the snapshot that was made of it. A node that leaves is in none that is made later,
    but until the others follow one of those (`recovered`) they need it: its end is a loss as long, unless it says it is done.

    Where training is over, or cannot go on, the nodes that are left save together what they have: `close` makes the snapshots
    then, without pipelines. It ends when one of them is done, for then all is saved, or nobody is left.
    """

    job: str
    record: Record
    members: dict[str, Member] = field(default_factory=dict)
    """In the order in which they came."""
    _awaited_until_s: dict[str, float] = field(default_factory=dict)  # nodes of a former leader's that are to come again
    _without_model: set[str] = field(default_factory=set)  # nodes of the snapshot that came back with nothing
    _parting: dict[str, int] = field(default_factory=dict)  # nodes that leave -> the first generation without them
    _idle: frozenset[str] = frozenset()
    _under_way: int = 0  # the newest generation under which nodes train
    _losses: list[str] = field(default_factory=list)  # in words, of those that no snapshot has taken in
    _is_saved: bool = False

    @property
    def snapshot(self) -> Snapshot:
        """The newest; of generation 0 before the first."""
        return self.record.snapshot

    @property
    def formed(self) -> bool:
        """Whether there are pipelines: not before enough nodes are there, nor when training cannot go on."""
        return bool(self.snapshot.pipelines)

    @property
    def closing(self) -> bool:
        """Whether its nodes only save what they have."""
        return bool(self.record.since) and not self.formed

    def includes(self, name: str) -> bool:
        """Whether the newest snapshot does."""
        return name in self.record.since

    def await_nodes(self, now_s: float) -> None:
        """All nodes of the snapshot, which a former leader heard of, are there if they say so within REJOIN_S."""
        self._awaited_until_s = {node: now_s + REJOIN_S for node in self.record.since if node not in self.members}

    def hello(self, name: str, address: str, generation: int, now_s: float, *, leaving: bool = False) -> None:
        """A node is there (again). `generation`: of the newest snapshot that it follows. `leaving`: it has said so before.

        Raises ConflictError where there is no such snapshot.
        """
        if generation > self.snapshot.generation:
            raise ConflictError(
                f"node {name!r} follows generation {generation} of job {self.job!r}, which has "
                f"{self.snapshot.generation or 'none'}: start the node again"
            )
        self._awaited_until_s.pop(name, None)
        self._parting.pop(name, None)
        if generation < self.record.since.get(name, 0):
            self._without_model.add(name)
            self._losses.append(f"{name} came back without the model")
        self.members.pop(name, None)
        self.members[name] = Member(address=address, heard_s=now_s, leaving=leaving)
        if leaving and name not in self.record.since:
            self._parting[name] = self.snapshot.generation

    def hear(self, name: str, now_s: float) -> None:
        """A node says something."""
        if (member := self.members.get(name)) is not None:
            member.heard_s = now_s

    def leave(self, name: str) -> None:
        """A node is going to end."""
        if (member := self.members.get(name)) is not None:
            member.leaving = True

    def lose(self, name: str, why: str, *, done: bool = False) -> bool:
        """A node is there no more. `done`: it had nothing left to do. Whether the others miss it."""
        self.members.pop(name, None)
        self._awaited_until_s.pop(name, None)
        parts, is_in = self._parting.pop(name, 0) > 0, name in self.record.since
        self._is_saved |= done and is_in
        missed = not done and (parts or (is_in and name not in self._without_model))
        if missed:
            self._losses.append(f"{name} was lost ({why})")
        return missed

    def excuse(self, name: str, now_s: float) -> None:
        """A node's stream has ended, perhaps for want of an answer: it may come again within REJOIN_S."""
        self.members.pop(name, None)
        if name in self.record.since:
            self._awaited_until_s[name] = now_s + REJOIN_S

    def recovered(self, generation: int) -> None:
        """Training goes on under that generation."""
        self._under_way = generation
        self._parting = {name: without for name, without in self._parting.items() if without > generation}

    def cut_off(self, name: str, generation: int) -> None:
        """A node of the newest snapshot lost its connections, though no other node is lost: all are to connect anew."""
        if generation == self.snapshot.generation and name in self.record.since and not self._losses:
            self._losses.append(f"{name} was cut off from other nodes")

    def late(self, now_s: float) -> dict[str, str]:
        """Nodes that have been silent for too long, and what to say of each."""
        silent = {
            name: f"silent for {now_s - member.heard_s:.1f} s"
            for name, member in self.members.items()
            if now_s - member.heard_s > LEASE_S
        }
        absent = {name: f"not back after {REJOIN_S:.0f} s" for name, until_s in self._awaited_until_s.items() if now_s > until_s}
        return silent | absent

    def take_change(self) -> Change | None:
        """What the next snapshot is to take in; None where nothing is. To be followed by `adopt`."""
        staying = {name: member for name, member in self.members.items() if not member.leaving}
        joined = {name: m.address for name, m in staying.items() if name not in self.record.since}
        if not self.formed:
            enough = len(joined) >= self.record.spec.num_nodes
            return Change(joined=joined, at_step_end=False, text=f"{len(joined)} nodes are there") if enough else None
        here = (staying.keys() | self._awaited_until_s.keys()) - self._without_model
        lost = frozenset(self.record.since.keys() - here)
        new = [name for name in joined if name not in self._idle]
        under_way, rerouted = self._under_way == self.snapshot.generation, is_rerouted(self.snapshot)
        if rerouted and not under_way and not self._losses:  # all nodes are to follow it before anything else
            return None
        if not (lost or new or rerouted or self._losses):
            return None
        leaving = frozenset(name for name in lost if name in self.members and self.members[name].leaving)
        losses, self._losses = self._losses, []
        words = [
            *losses,
            *(f"{name} leaves" for name in self.record.since if name in leaving),
            *(f"{name} joined" for name in new),
        ]
        if rerouted and not words:
            words = ["the step of the rerouted microbatches ends"]
        in_step = bool(lost and losses) and under_way and not rerouted and not leaving
        text = "; ".join(words)
        return Change(lost=lost, leaving=leaving, joined=joined, at_step_end=not losses, in_step=in_step, text=text)

    def adopt(self, successor: Successor, change: Change) -> bool:
        """Take up the snapshot that was made of `change`, if it says anything new: nodes that joined may all be idle."""
        snapshot, former, since = successor.snapshot, self.snapshot, self.record.since
        self._idle = successor.idle
        if snapshot.error:
            self._close_with(snapshot)
            return True
        if change.at_step_end and list(former.pipelines) == list(snapshot.pipelines):
            return False
        self._without_model -= change.lost
        self._parting |= dict.fromkeys(change.leaving & self.members.keys(), snapshot.generation)
        came = {node.name: since.get(node.name, snapshot.generation) for node in snapshot.nodes}
        self.record = replace(self.record, snapshot=snapshot, since=came)
        return True

    def close(self) -> bool:
        """In place of `take_change` and `adopt`, when all steps are committed or training cannot go on. Whether there is news."""
        here = {name for name in self.record.since if name in self.members or name in self._awaited_until_s}
        if here and not self._losses and not (self._is_saved and self.closing):
            return False
        generation, left = self.snapshot.generation + 1, here - self._without_model
        nodes = [] if self._is_saved else [node for node in self.snapshot.nodes if node.name in left]
        change, error = "; ".join(self._losses), self.snapshot.error
        self._close_with(Snapshot(generation=generation, urgent=generation, nodes=nodes, change=change, error=error))
        return True

    def end(self, error: str) -> None:
        """Training does not go on, and nobody has anything to save: the next snapshot says why."""
        generation = self.snapshot.generation + 1
        self._close_with(Snapshot(generation=generation, urgent=generation, error=error))

    def _close_with(self, snapshot: Snapshot) -> None:
        since = {node.name: self.record.since[node.name] for node in snapshot.nodes}
        self.record = replace(self.record, snapshot=snapshot, since=since)
        self._parting, self._losses = {}, []
