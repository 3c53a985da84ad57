"""The nodes of one recoverable job: their streams, the watch over them, and the store's copy of their newest snapshot."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import deque
from collections.abc import Collection
from contextlib import suppress

from headrace.errors import ConflictError, HeadraceError, UnavailableError, UserError
from headrace.limits import MAX_NODE_NAME
from headrace.observability.logs import pairs
from headrace.reorder_service.jobs.formation import Formation
from headrace.reorder_service.jobs.job import JobRun
from headrace.reorder_service.jobs.job_execution import execution_of
from headrace.reorder_service.jobs.stopping import stop_task
from headrace.reorder_service.nodes.clock import Clock
from headrace.reorder_service.nodes.membership import LEASE_S, Membership, Record
from headrace.reorder_service.nodes.node_stream import NodeStream, NodeStreams
from headrace.reorder_service.nodes.snapshots import (
    Change,
    Successor,
    job_formation,
    mean_microbatch,
    next_snapshot,
    shape,
    templates_of,
)
from headrace.reorder_service.recovery.pipeline_templates import Templates
from headrace.reorder_service.store.state import StateStore
from headrace.reorder_service.store.store_retry import retry_while_unavailable
from headrace.snapshot import processes_of
from headrace.v1.membership_pb2 import NodeHello, Recovered, Snapshot

log = logging.getLogger(__name__)

LOOK_S = 0.1
SAMPLES_S = 5.0  # how long pipelines wait for the job's first plan, without which nodes could not train anyway
SETTLE_S = 0.005  # processes that are killed together are gone within milliseconds: this makes it one loss and one recovery
NUM_RECOVERIES = 32  # latest recoveries that are kept to be shown


class Nodes:
    """Takes in what the nodes of one job say, and sends them snapshots of their pipelines, each saved in the store before.

    All methods must be called from one event loop. `start` begins the watch over the nodes.
    """

    def __init__(self, run: JobRun, store: StateStore) -> None:
        self._run = run
        self._store = store
        self._clock = Clock()
        self._membership: Membership | None = None
        self._templates: Templates | None = None
        self._streams = NodeStreams()
        self._changed, self._formed = asyncio.Event(), asyncio.Event()
        self._saving = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.snapshot = Snapshot()
        """The newest snapshot that a node may know. It is in the store, unless it only says why nodes were let go (`_forget`)."""
        self.recoveries: deque[Recovered] = deque(maxlen=NUM_RECOVERIES)
        """The latest recoveries that nodes have told this leader about."""

    # -- life cycle ---------------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Load the membership that a former leader left in the store, if any."""
        document = await self._store.load_membership(self._run.name)
        if document is not None:
            record = Record.of_json(document)
            self._membership, self.snapshot = Membership(self._run.name, record), record.snapshot
            self._run.formations = _formations(record)

    def start(self) -> None:
        """Begin the watch over the nodes, if there is a membership. A former leader's nodes have REJOIN_S from now to connect."""
        if self._membership is not None and (self._task is None or self._task.done()):
            self._membership.await_nodes(self._clock.now_s())
            self._task = asyncio.create_task(self._watch(), name=f"nodes {self._run.name}")

    async def stop(self) -> None:
        """Stop the watch and end all streams with UnavailableError, so that every node looks for another reorder service."""
        await stop_task(self._task)
        self._dismiss(UnavailableError("this reorder service has stopped"))

    async def _watch(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_nodes())
                group.create_task(self._make_snapshots())
                group.create_task(self._plan_for_formations())
        except* Exception:
            log.exception("nodes let go on an internal error %s", pairs(job=self._run.name))
            self._forget("internal error; see the reorder service's log")
            self._dismiss(HeadraceError(self.snapshot.error))

    def _dismiss(self, error: HeadraceError | None) -> None:
        self._streams.end(error)

    @property
    def connected(self) -> bool:
        """Whether any process of a node is connected."""
        return bool(self._streams)

    def _forget(self, why: str) -> None:
        """Drop the membership. Nodes that come later begin a new one, whose generations count on from the present one."""
        if self._membership is not None:
            self._membership.end(why)
            self.snapshot = self._membership.snapshot
            self._membership = None

    # -- what nodes say -----------------------------------------------------------------------------------------------

    def join(self, hello: NodeHello) -> NodeStream:
        """Take in a process of a node that connects, for the first time or again, and return its stream.

        The node is a member once all its processes are connected. Raises UserError for an invalid name or address, ConflictError
        where the node does not fit the job or the others, and UnavailableError while the nodes of an ended training still save.
        """
        job, name = self._run.name, hello.node
        membership, is_new = self._membership, not hello.generation
        if is_new and self._is_over:
            raise ConflictError(f"job {job!r} is over ({self._run.cursor.state}): it takes no nodes any more")
        if not (0 < len(name) <= MAX_NODE_NAME and 0 < len(hello.address) <= MAX_NODE_NAME):
            raise UserError(
                f"node {name[:MAX_NODE_NAME]!r} of job {job!r} with address {hello.address[:MAX_NODE_NAME]!r}: a node needs a "
                f"name and HOST:PORT, of at most {MAX_NODE_NAME} characters"
            )
        if not 0 <= hello.process < processes_of(hello.spec):
            raise UserError(f"process {hello.process} of node {name!r}, of which each has {processes_of(hello.spec)}")
        if is_new and membership is not None and membership.closing:
            raise UnavailableError(f"job {job!r} takes nodes when those that it had have saved what they have")
        is_in = membership is not None and membership.includes(name)
        if not (is_new or is_in) and (self._is_over or self.snapshot.error):  # it has not heard yet that training is over
            stream = NodeStream(hello)
            stream.tell(self.snapshot)
            stream.end()
            return stream
        if membership is None or not (membership.formed or membership.closing or self._streams):
            record = Record(spec=hello.spec, snapshot=self.snapshot, job_generation=self._run.generation)
            membership = self._membership = Membership(job, record)
            self._templates = None
        if hello.spec != membership.record.spec:
            raise ConflictError(f"node {name!r} has another specification than the first node of job {job!r}: start all alike")
        stream = NodeStream(hello, self._clock.now_s())
        streams = [*(other for other in self._streams.of(name) if other.process != stream.process), stream]
        if len(streams) == processes_of(hello.spec):
            address = min(streams, key=lambda other: other.process).address
            generation, leaving = min(other.generation for other in streams), any(other.leaving for other in streams)
            membership.hello(name, address, generation, stream.heard_s, leaving=leaving)
            log.info("node joined %s", pairs(job=job, node=name, address=address, generation=generation))
        self._streams.add(stream)
        if membership.formed or membership.closing:
            stream.tell(self.snapshot)
        self._changed.set()
        self.start()
        return stream

    def hear(self, stream: NodeStream) -> None:
        """Note that a process of a node was heard."""
        stream.heard_s = self._clock.now_s()
        if (membership := self._membership_of(stream)) is not None:
            membership.hear(stream.node, min(one.heard_s for one in self._streams.of(stream.node)))

    def leave(self, stream: NodeStream) -> None:
        """Note that a node has announced that it is going to end."""
        if (membership := self._membership_of(stream)) is not None:
            log.info("node leaves %s", pairs(job=self._run.name, node=stream.node))
            stream.leaving = True
            membership.leave(stream.node)
            self._changed.set()

    def cut_off(self, stream: NodeStream, generation: int) -> None:
        """Note that a node has lost its connections to others. `generation`: the snapshot that it follows."""
        if (membership := self._membership_of(stream)) is not None:
            log.warning("node cut off %s", pairs(job=self._run.name, node=stream.node, generation=generation))
            membership.cut_off(stream.node, generation)
            self._changed.set()

    def recovered(self, stream: NodeStream, message: Recovered) -> None:
        """Note that training goes on under a snapshot, and keep what the recovery took."""
        if (membership := self._membership_of(stream)) is not None:
            membership.recovered(message.generation, message.step)
            units = self._run.planned_spec.topology.stages.keys()
            if _is_valid(message, membership.record, units) and membership.form(message.formation, self._run.cursor.committed):
                self._formed.set()
            self._changed.set()
            if message.generation not in {former.generation for former in self.recoveries}:  # nodes repeat it to a new leader
                phases = {phase.name: phase.seconds for phase in message.phases}
                log.info("recovered %s", pairs(job=self._run.name, generation=message.generation, step=message.step, **phases))
                if self.snapshot.generation == message.generation:
                    message.change, message.choice = self.snapshot.change, self.snapshot.choice
                self.recoveries.append(message)

    def end(self, stream: NodeStream, why: str, *, done: bool = False) -> None:
        """Remove a node of which a process's stream has ended, and with it its other processes.

        `done`: whether the process had said that it had nothing left to do; then the others have their own say.
        """
        if self._streams.discard(stream):
            if self._membership is not None and self._clock.held_up(LEASE_S):
                self._membership.excuse(stream.node, self._clock.now_s())  # it found no answer here and may come back
            else:
                siblings = self._streams.of(stream.node)
                self._remove(stream.node, f"process {stream.process}: {why}" if siblings else why, done=done)

    def _remove(self, node: str, why: str, *, done: bool = False) -> None:
        """Remove a node, and end the streams of those of its processes that still have one, unless it is done."""
        if not done:
            self._streams.lose(node, why)
        if self._membership is not None and self._membership.remove(node, why, done=done):
            log.warning("node lost %s", pairs(job=self._run.name, node=node, why=why))
        self._changed.set()

    def _membership_of(self, stream: NodeStream) -> Membership | None:
        """Return the membership, or None where the node is no longer in it by this stream."""
        return self._membership if stream in self._streams else None

    @property
    def present(self) -> list[tuple[str, bool, bool]]:
        """(name, whether it is connected, whether it leaves) of each node that is connected or may come back."""
        return self._membership.present if self._membership is not None else []

    # -- the watch ----------------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        """Whether the job has ended, or all its steps are committed."""
        return self._run.cursor.is_over or self._run.cursor.is_at_end

    async def _watch_nodes(self) -> None:
        """Remove nodes that are silent or absent for too long, and notice when the job fails, is cancelled or is reset."""
        while True:
            await self._clock.sleep(LOOK_S)
            now_s, membership = self._clock.now_s(), self._membership
            late = membership.late(now_s, self._run.cursor.committed) if membership is not None else {}
            for node, why in late.items():
                self._remove(node, self._streams.silent(node, why))
            if self._end_of_job():
                self._changed.set()

    def _end_of_job(self) -> str:
        """Return why the nodes must stop: the job has failed, was cancelled, or goes on in another generation.

        Empty where they need not, also when all steps are committed.
        """
        run, membership = self._run, self._membership
        if membership is None:
            return ""
        if run.cursor.state in ("FAILED", "CANCELLED"):
            return run.cursor.message or f"job {run.name!r} is over"
        if membership.record.job_generation != run.generation:
            return (
                f"job {run.name!r} goes on from step {run.cursor.committed} in generation {run.generation}: start its nodes again"
            )
        return ""

    async def _make_snapshots(self) -> None:
        """Turn changes into new snapshots until cancelled; changes within SETTLE_S make one."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE_S)
            self._changed.clear()
            try:
                while (membership := self._membership) is not None and await self._take_in_changes(membership):
                    pass
            except UserError as err:  # the specification is invalid
                log.error("nodes refused %s", pairs(job=self._run.name, error=err))
                self._forget(str(err))
                self._dismiss(err)

    async def _plan_for_formations(self) -> None:
        """Have the job's steps planned for each new formation until cancelled.

        It is saved before: a later leader must plan the steps alike that nodes begin with these plans.
        """
        while True:
            await self._formed.wait()
            self._formed.clear()
            if (membership := self._membership) is not None:
                await self._save(membership.record)
                await self._run.follow(_formations(membership.record))

    async def _take_in_changes(self, membership: Membership) -> bool:
        """Take in what has happened since the newest snapshot; return whether that may have left more to take in."""
        if why := self._end_of_job():
            membership.end(why)
            log.info("nodes let go %s", pairs(job=self._run.name, why=why))
            await self._publish(membership.record)
            return True
        if membership.closing or (self._is_over and membership.formed):
            return await self._close(membership)
        if self._is_over:
            return False  # there never were enough nodes, and they hear of the end from their sessions
        former = membership.snapshot
        if self._templates is None:
            if not (membership.formed or membership.record.unit_seconds):
                membership.weigh(await self._unit_seconds())
            templates = await asyncio.to_thread(templates_of, membership.record.weighted_spec)
            if self._membership is not membership:  # all nodes left meanwhile, and others came
                return True
            self._templates = templates
        change = membership.take_change()
        if change is None:
            return False
        spec = membership.record.weighted_spec
        successor = await asyncio.to_thread(next_snapshot, spec, self._templates, former, change, step_s=self._step_s())
        if self._membership is membership and membership.adopt(successor, change):
            self._report(successor, change, former)
            await self._publish(membership.record)
        return True

    async def _unit_seconds(self) -> dict[str, float]:
        """Return what a mean microbatch of the first steps takes in each unit; empty where none is planned within SAMPLES_S."""
        run = self._run
        with suppress(TimeoutError):
            async with asyncio.timeout(SAMPLES_S):
                await run.cursor.first_planned()
        topology = run.planned_spec.topology.topology()
        planned = [step for step in run.cursor.planned if step.costs]
        if not planned:
            return {}
        execution = planned[0].correction.execution(execution_of(run.planned_spec, topology))
        return mean_microbatch([step.costs for step in planned], execution, topology)

    async def _close(self, membership: Membership) -> bool:
        """Publish the next snapshot for nodes that only save what they hold; return whether there was one."""
        if not membership.close():
            return False
        left, change = [node.name for node in membership.snapshot.nodes], membership.snapshot.change
        log.info("nodes end %s", pairs(job=self._run.name, left=",".join(left), change=change))
        await self._publish(membership.record)
        return True

    def _step_s(self) -> float:
        """Return the seconds of a step: the median of the recent steps if known, else the mean of all; 0 before the first."""
        recent = [commit.step_s for step in self._run.cursor.recent for commit in step.commits.values() if commit.step_s]
        return statistics.median(recent) if recent else self._run.cursor.progress.step_s / max(1, self._run.cursor.committed)

    def _report(self, successor: Successor, change: Change, former: Snapshot) -> None:
        snapshot, job = successor.snapshot, self._run.name
        if snapshot.error:
            log.error("nodes cannot go on %s", pairs(job=job, error=snapshot.error, change=change.text))
            return
        if not former.pipelines:
            log.info("nodes formed %s", pairs(job=job, nodes=len(snapshot.nodes)))
        if spare := self._templates.specification.say_spare(len(snapshot.nodes)) if self._templates else "":
            log.warning("no node to spare %s", pairs(job=job, generation=snapshot.generation, why=spare))
        log.info(
            "pipelines %s",
            pairs(
                job=job,
                generation=snapshot.generation,
                nodes=len(snapshot.nodes),
                pipelines=shape(snapshot),
                copied_bytes=successor.copied_bytes,
                change=change.text,
                choice=snapshot.choice,
            ),
        )

    async def _publish(self, record: Record) -> None:
        """Save the record in the store, and then send its snapshot to all nodes."""
        snapshot, streams = record.snapshot, self._streams
        if not snapshot.nodes:  # nodes that come from now on begin a new membership
            self._membership, self._streams, self.snapshot = None, NodeStreams(), snapshot
        await self._save(record)
        self.snapshot = snapshot
        for stream in streams:
            stream.tell(snapshot)
            if not snapshot.nodes:
                stream.end()

    async def _save(self, record: Record) -> None:
        """Save a record in the store, or a newer one of the membership."""
        job = self._run.name
        async with self._saving:
            document = (self._membership.record if self._membership is not None else record).to_json()
            await retry_while_unavailable(lambda: self._store.save_membership(job, document), job=job)


def _is_valid(message: Recovered, record: Record, units: Collection[str]) -> bool:
    """Return whether steps can be planned for a message's formation: its pipelines have all layers, and all units of the job.

    It is logged if not.
    """
    try:
        if lacking := set(units) - {unit.unit for unit in record.spec.profile.units}:
            raise ValueError(f"the nodes have no {', '.join(sorted(lacking))}, which the job's topology has")
        job_formation(message.formation, record.weighted_spec.profile)
    except ValueError as err:
        log.warning("formation refused %s", pairs(generation=message.generation, error=err))
        return False
    return True


def _formations(record: Record) -> list[Formation]:
    profile = record.weighted_spec.profile
    return [job_formation(formation, profile) for formation in record.formations]
