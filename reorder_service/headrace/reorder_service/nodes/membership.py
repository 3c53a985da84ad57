"""Membership of a recoverable job: which nodes are connected, and when a change needs a new snapshot of their pipelines.

Pure: the caller says what happens, and when. The streams, the store and the clock are in headrace.reorder_service.nodes.nodes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from google.protobuf.json_format import MessageToDict, ParseDict  # type: ignore[import-untyped]

from headrace.errors import ConflictError
from headrace.reorder_service.nodes.snapshots import Change, Successor
from headrace.snapshot import is_rerouted
from headrace.v1.membership_pb2 import Formation, NodesSpec, Snapshot

LEASE_S = 1.0  # a node that is silent for so long is lost: three heartbeats
FIRST_STEP_LEASE_S = (
    10.0  # the same until it has trained a step: it loads libraries and compiles, and may hold Python up meanwhile
)
LEAST_SHARE = 1e-3  # of the time of all units: one that the job's first samples do not need gets layers and a node all the same
REJOIN_S = 3.0  # how long a new leader waits for the former one's nodes: clients retry at least once a second


@dataclass(slots=True, kw_only=True)
class ConnectedNode:
    """A connected node."""

    address: str
    heard_s: float
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The state of a membership that must survive the reorder service; a new leader reads it from the store."""

    spec: NodesSpec
    snapshot: Snapshot
    joined_generation: Mapping[str, int] = field(default_factory=dict)
    """Node of the snapshot -> generation with which it joined. A node that comes back and follows only an earlier generation
    holds nothing of the model."""
    unit_seconds: Mapping[str, float] = field(default_factory=dict)
    """Predicted seconds of a mean microbatch in each unit, from the job's first samples; empty where none were known in time."""
    formations: tuple[Formation, ...] = ()
    """The pipelines that the job's uncommitted steps are planned for, by rising generation."""
    job_generation: int
    """The job's generation, which counts its resets and changes of topology, when the membership began."""

    @property
    def weighted_spec(self) -> NodesSpec:
        """The spec with the layers' seconds in proportion to what the job's samples take in each unit, as far as that is known.

        Within a unit the layers keep their proportions. A unit that takes next to nothing counts as LEAST_SHARE of all units.
        """
        spec = NodesSpec()
        spec.CopyFrom(self.spec)
        profile = spec.profile
        if {unit.unit for unit in profile.units} == self.unit_seconds.keys():
            least, end = LEAST_SHARE * sum(self.unit_seconds.values()), 0
            for unit in profile.units:
                layers, end = slice(end, end + unit.num_layers), end + unit.num_layers
                if total := sum(profile.seconds[layers]):
                    scale = max(self.unit_seconds[unit.unit], least) / total
                    profile.seconds[layers] = [scale * seconds for seconds in profile.seconds[layers]]
        return spec

    def to_json(self) -> str:
        """Return the record as JSON, for the store."""
        spec, snapshot = MessageToDict(self.spec), MessageToDict(self.snapshot)
        formations = [MessageToDict(formation) for formation in self.formations]
        fields = {
            "spec": spec,
            "snapshot": snapshot,
            "since": self.joined_generation,
            "unit_seconds": dict(self.unit_seconds),
            "formations": formations,
            "job_generation": self.job_generation,
        }
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def of_json(cls, document: str) -> Record:
        """Parse what `to_json` has returned. Fields that a newer release has added are left out."""
        fields, parsed = json.loads(document), functools.partial(ParseDict, ignore_unknown_fields=True)
        return cls(
            spec=parsed(fields["spec"], NodesSpec()),
            snapshot=parsed(fields["snapshot"], Snapshot()),
            joined_generation=fields["since"],
            unit_seconds=fields.get("unit_seconds", {}),
            formations=tuple(parsed(formation, Formation()) for formation in fields.get("formations", ())),
            job_generation=fields["job_generation"],
        )


@dataclass(slots=True)
class Membership:
    """The connected nodes of one job, and the newest snapshot of the pipelines that they form.

    A node of the newest snapshot that is not connected is lost; a connected node that is not in the snapshot joins. `take_change`
    sums up all changes since that snapshot, and `adopt` installs the snapshot made from them. A node that has announced that it
    leaves is in no later snapshot. But the others need it until they train under one of those (`recovered`): if it ends before,
    that is a loss, unless it says that it is done.

    Where training is over or cannot go on, the remaining nodes save together what they hold: `close` makes the snapshots then,
    without pipelines. The membership ends when one of these nodes is done, since everything is saved then, or when none is left.
    """

    job: str
    record: Record
    connected: dict[str, ConnectedNode] = field(default_factory=dict)
    """Connected nodes by name, in the order in which they connected."""
    _awaited_until_s: dict[str, float] = field(default_factory=dict)  # nodes that may come back -> until when
    _without_model: set[str] = field(default_factory=set)  # nodes of the snapshot that came back without the model
    _parting: dict[str, int] = field(default_factory=dict)  # nodes that leave -> the first generation without them
    _idle: frozenset[str] = frozenset()
    _under_way: int = 0  # the newest generation under which nodes train
    _first_step: int = 0  # the step with which they began to
    _trained: set[str] = field(default_factory=set)  # connected nodes that have trained a step
    _losses: list[str] = field(default_factory=list)  # what was lost, in words, as far as no snapshot has taken it in
    _is_saved: bool = False

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot; an empty one of generation 0 before the first."""
        return self.record.snapshot

    @property
    def formed(self) -> bool:
        """Whether there are pipelines: not before enough nodes have connected, nor when training has ended."""
        return bool(self.snapshot.pipelines)

    @property
    def closing(self) -> bool:
        """Whether its nodes have ended training and only save what they hold."""
        return bool(self.record.joined_generation) and not self.formed

    def includes(self, name: str) -> bool:
        """Whether the newest snapshot has this node."""
        return name in self.record.joined_generation

    @property
    def present(self) -> list[tuple[str, bool, bool]]:
        """(name, whether it is connected, whether it leaves) of each node that is connected or may come back."""
        here = [(name, True, node.leaving) for name, node in self.connected.items()]
        return here + [(name, False, False) for name in self._awaited_until_s]

    def await_nodes(self, now_s: float) -> None:
        """Expect the nodes of the snapshot, which were connected to a former leader, to connect here within REJOIN_S."""
        self._awaited_until_s = {node: now_s + REJOIN_S for node in self.record.joined_generation if node not in self.connected}

    def hello(self, name: str, address: str, generation: int, now_s: float, *, leaving: bool = False) -> None:
        """Take in a node that connects, for the first time or again.

        `generation`: the newest snapshot that the node follows; 0: it holds nothing of the model. `leaving`: whether it has
        announced before that it leaves. Raises ConflictError where no snapshot has that generation yet.
        """
        if generation > self.snapshot.generation:
            raise ConflictError(
                f"node {name!r} follows generation {generation} of job {self.job!r}, which has "
                f"{self.snapshot.generation or 'none'}: start the node again"
            )
        self._awaited_until_s.pop(name, None)
        self._parting.pop(name, None)
        if not generation:
            self._trained.discard(name)
        if generation < self.record.joined_generation.get(name, 0):
            self._without_model.add(name)
            self._losses.append(f"{name} came back without the model")
        self.connected.pop(name, None)
        self.connected[name] = ConnectedNode(address=address, heard_s=now_s, leaving=leaving)
        if leaving and name not in self.record.joined_generation:
            self._parting[name] = self.snapshot.generation

    def hear(self, name: str, now_s: float) -> None:
        """Note that a node was heard at `now_s`."""
        if (member := self.connected.get(name)) is not None:
            member.heard_s = now_s

    def leave(self, name: str) -> None:
        """Note that a node has announced that it is going to end."""
        if (member := self.connected.get(name)) is not None:
            member.leaving = True

    def remove(self, name: str, why: str, *, done: bool = False) -> bool:
        """Remove a node, and return whether the others still needed it. `done`: it had said that it had nothing left to do."""
        self.connected.pop(name, None)
        self._trained.discard(name)
        self._awaited_until_s.pop(name, None)
        parts, is_in = self._parting.pop(name, 0) > 0, name in self.record.joined_generation
        self._is_saved |= done and is_in
        missed = not done and (parts or (is_in and name not in self._without_model))
        if missed:
            self._losses.append(f"{name} was lost ({why})")
        return missed

    def excuse(self, name: str, now_s: float) -> None:
        """Remove a node whose stream ended, perhaps for want of an answer from here: it may come back within REJOIN_S."""
        self.connected.pop(name, None)
        if name in self.record.joined_generation:
            self._awaited_until_s[name] = now_s + REJOIN_S

    def recovered(self, generation: int, step: int) -> None:
        """Note that training goes on with `step` under a generation: nodes that are not in its snapshot are needed no more."""
        self._under_way, self._first_step = generation, step
        self._parting = {name: without for name, without in self._parting.items() if without > generation}

    def weigh(self, unit_seconds: Mapping[str, float]) -> None:
        """Note what a mean microbatch takes in each unit, in seconds, from which the pipelines are planned."""
        self.record = replace(self.record, unit_seconds=unit_seconds)

    def form(self, formation: Formation, committed: int) -> bool:
        """Note from which step on training goes on with which pipelines; return whether that is new.

        Formations that no step from `committed` on, the number of committed steps, is planned for are dropped.
        """
        former = self.record.formations
        if not formation.pipelines or (former and formation.generation <= former[-1].generation):
            return False
        begun = [one for one in former if one.first_step < formation.first_step]
        kept = [one for one, following in pairwise([*begun, formation]) if following.first_step > committed]
        self.record = replace(self.record, formations=(*kept, formation))
        return True

    def cut_off(self, name: str, generation: int) -> None:
        """Note that a node was cut off from other nodes though none is lost, so that the next snapshot has all connect anew.

        Ignored unless `generation` is that of the newest snapshot, the node is in it, and no loss explains it.
        """
        if generation == self.snapshot.generation and name in self.record.joined_generation and not self._losses:
            self._losses.append(f"{name} was cut off from other nodes")

    def late(self, now_s: float, committed: int) -> dict[str, str]:
        """Return the nodes that have been silent or absent for too long, each with a phrase that says so.

        `committed`: how many of the job's steps are; the nodes of a snapshot under way have trained those from its first one on.
        """
        if committed > self._first_step and self._under_way == self.snapshot.generation:
            self._trained |= (self.record.joined_generation.keys() & self.connected.keys()) - self._without_model
        silent = {
            name: f"silent for {now_s - member.heard_s:.1f} s"
            for name, member in self.connected.items()
            if now_s - member.heard_s > (LEASE_S if name in self._trained else FIRST_STEP_LEASE_S)
        }
        absent = {name: f"not back after {REJOIN_S:.0f} s" for name, until_s in self._awaited_until_s.items() if now_s > until_s}
        return silent | absent

    def take_change(self) -> Change | None:
        """Return what the next snapshot has to take in, or None. The caller makes that snapshot and passes it to `adopt`."""
        staying = {name: member for name, member in self.connected.items() if not member.leaving}
        joined = {name: m.address for name, m in staying.items() if name not in self.record.joined_generation}
        if not self.formed:
            enough = len(joined) >= self.record.spec.num_nodes
            return Change(joined=joined, at_step_end=False, text=f"{len(joined)} nodes are there") if enough else None
        here = (staying.keys() | self._awaited_until_s.keys()) - self._without_model
        lost = frozenset(self.record.joined_generation.keys() - here)
        new = [name for name in joined if name not in self._idle]
        under_way, rerouted = self._under_way == self.snapshot.generation, is_rerouted(self.snapshot)
        if rerouted and not under_way and not self._losses:  # nothing else changes until all nodes follow it
            return None
        if not (lost or new or rerouted or self._losses):
            return None
        leaving = frozenset(name for name in lost if name in self.connected and self.connected[name].leaving)
        losses, self._losses = self._losses, []
        words = [
            *losses,
            *(f"{name} leaves" for name in self.record.joined_generation if name in leaving),
            *(f"{name} joined" for name in new),
        ]
        if rerouted and not words:
            words = ["the step of the rerouted microbatches ends"]
        in_step = bool(lost and losses) and under_way and not rerouted and not leaving
        text = "; ".join(words)
        return Change(lost=lost, leaving=leaving, joined=joined, at_step_end=not losses, in_step=in_step, text=text)

    def adopt(self, successor: Successor, change: Change) -> bool:
        """Install the snapshot made from `change`; return False if it has no news, as when all nodes that joined are idle."""
        snapshot, former, joined = successor.snapshot, self.snapshot, self.record.joined_generation
        self._idle = successor.idle
        if snapshot.error:
            self._close_with(snapshot)
            return True
        if change.at_step_end and list(former.pipelines) == list(snapshot.pipelines):
            return False
        self._without_model -= change.lost
        self._parting |= dict.fromkeys(change.leaving & self.connected.keys(), snapshot.generation)
        joined_generation = {node.name: joined.get(node.name, snapshot.generation) for node in snapshot.nodes}
        self.record = replace(self.record, snapshot=snapshot, joined_generation=joined_generation)
        return True

    def close(self) -> bool:
        """Make the next snapshot, without pipelines, of the nodes that still save; return False where nothing has changed.

        This takes the place of `take_change` and `adopt` when all steps are committed or training cannot go on.
        """
        here = {name for name in self.record.joined_generation if name in self.connected or name in self._awaited_until_s}
        if here and not self._losses and not (self._is_saved and self.closing):
            return False
        generation, left = self.snapshot.generation + 1, here - self._without_model
        nodes = [] if self._is_saved else [node for node in self.snapshot.nodes if node.name in left]
        change, error = "; ".join(self._losses), self.snapshot.error
        self._close_with(Snapshot(generation=generation, urgent=generation, nodes=nodes, change=change, error=error))
        return True

    def end(self, error: str) -> None:
        """Make a last snapshot, without nodes, that says why training does not go on and there is nothing to save."""
        generation = self.snapshot.generation + 1
        self._close_with(Snapshot(generation=generation, urgent=generation, error=error))

    def _close_with(self, snapshot: Snapshot) -> None:
        joined_generation = {node.name: self.record.joined_generation[node.name] for node in snapshot.nodes}
        self.record = replace(self.record, snapshot=snapshot, joined_generation=joined_generation)
        self._parting, self._losses = {}, []
