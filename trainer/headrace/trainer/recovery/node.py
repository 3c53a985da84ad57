"""A process of a node of a recoverable job, which trains under the membership snapshots of its job, one after the other.

Most nodes are one process. The processes of a larger one have a stage each, are lost together, and join together.
"""

from __future__ import annotations

import logging
import signal
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

from headrace.errors import HeadraceError, UnrecoverableError, UserError
from headrace.observability.logs import pairs
from headrace.snapshot import is_rerouted
from headrace.trainer.devices import check_device, local_device, warn_quadratic_attention, warn_staged_nodes
from headrace.trainer.models.whole_model import WholeModel
from headrace.trainer.recovery.layout import Layout, finishes_step_first
from headrace.trainer.recovery.membership_client import MembershipClient
from headrace.trainer.recovery.mesh import MEET_TIMEOUT, STEP_TIMEOUT, Meeting, Mesh, MeshCutError
from headrace.trainer.recovery.node_evaluation import NodeEvaluations
from headrace.trainer.recovery.node_feed import NodeLoader
from headrace.trainer.recovery.node_training import Training
from headrace.trainer.recovery.nodes_spec import RecoverySpec, nodes_message
from headrace.trainer.train_step import PRECISIONS
from headrace.transport.base import TRANSPORTS
from headrace.v1 import membership_pb2

log = logging.getLogger(__name__)

NOTICE_S = 2.0  # how long a node whose connections ended waits for the snapshot that explains it before it asks for one
LOSS_S = 0.2  # how long it waits for a further snapshot if it knows a newer one that may still include the lost node
NOTICES = 30  # how many times it asks, as the service may be away


def train_recoverable(
    endpoint: str,
    *,
    job: str,
    spec: RecoverySpec,
    node: str,
    process: int = 0,
    host: str = "127.0.0.1",
    model_name: str = "",
    threads: int | None = None,
    transports: Sequence[str] = TRANSPORTS,
    precision: str = "fp32",
    checkpoint: Path | None = None,
    resume: Path | None = None,
    device: torch.device | None = None,
    fresh_weights: bool = False,
    evaluate_every: int | None = None,
) -> None:
    """Train as a process of one of the job's nodes until its last step is committed, whichever other nodes are lost or join.

    `node`: the node's name. `process`: which of its processes this is. `host`: host at which the other nodes reach it.
    `checkpoint`: folder, visible to all nodes, in which the model is saved at the job's end, or when training cannot go on.
    `resume`: folder with such a checkpoint to start from. `fresh_weights`: whether to start with fresh weights, if there is no
    `resume`, even if the job has committed steps already, which is refused otherwise. All other arguments are those of
    `headrace.trainer.train.train`.

    Raises UserError if job, spec, model and device do not fit each other, and UnrecoverableError if too few nodes are left or a
    layer is lost.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    number = zlib.crc32(f"{node}/{process}".encode()) >> 1
    device = device or local_device()
    check_device(device)
    warn_staged_nodes(device.type)
    with NodeLoader(endpoint, job=job, number=number, device=device, transports=transports) as loader:
        if set(loader.spec.topology.stages) != set(spec.units):
            raise UserError(
                f"the job plans for the units {', '.join(sorted(loader.spec.topology.stages))}, but the nodes have "
                f"{', '.join(sorted(spec.units))}: name the same ones in the job's topology.stages"
            )
        spec.check_execution(loader.spec.execution)
        model = WholeModel.of(model_name or loader.spec.model, loader.spec, loader.vocabulary, spec.model, dropout=spec.dropout)
        warn_quadratic_attention(device.type, precision, model.shape)
        nodes = _nodes(loader, spec, model, precision)
        training = Training(
            loader,
            spec,
            model,
            device=device,
            dtype=PRECISIONS[precision],
            checkpoint=checkpoint,
            resume=resume,
            fresh_weights=fresh_weights,
            evaluations=NodeEvaluations(endpoint, loader, evaluate_every),
        )
        meeting = Meeting(host)
        hello = membership_pb2.NodeHello(job=job, node=node, process=process, address=meeting.address, spec=nodes)
        with Node(MembershipClient(endpoint, hello), training, node, host, process) as member:
            log.info("joined %s", pairs(job=job, node=node, process=process, training_begins_with_nodes=spec.nodes))
            member.run()


def _nodes(loader: NodeLoader, spec: RecoverySpec, model: WholeModel, precision: str) -> membership_pb2.NodesSpec:
    return nodes_message(
        spec,
        model.shape,
        num_microbatches=loader.spec.topology.replicas * loader.spec.topology.microbatches,
        vocab_size=loader.vocabulary.size,
        image=loader.spec.image,
        audio=loader.spec.audio,
        precision=precision,
    )


class Node:
    """A process of a node: joins the membership, and trains under each snapshot until the job ends or the node leaves."""

    def __init__(self, membership: MembershipClient, training: Training, node: str, host: str, process: int = 0) -> None:
        """`node`: name of the node. `host`: at which the other nodes reach it. `process`: which of its processes this is."""
        self._membership, self._training, self._node, self._process, self._host = membership, training, node, process, host
        self._who = {"node": node, "process": process}  # for the log
        self._mesh: Mesh | None = None
        self._running = membership_pb2.Snapshot()  # the snapshot that the mesh is of
        self._urgent_only = False  # if so, only urgent snapshots cut the mesh: others hold from the end of a step on
        self._lock = threading.Lock()  # guards the three above
        self._leaves = False
        self._has_place = False
        self._is_done = True  # whether the others lose nothing when this node ends
        self._over = threading.Event()

    def __enter__(self) -> Node:
        self._membership.open()
        threading.Thread(target=self._watch, name="snapshots", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._close_mesh()
        self._training.close()
        self._membership.close(done=kind in (None, UnrecoverableError) and self._is_done)

    def run(self) -> None:
        """Train until the job's end, or until this node has left: on SIGTERM it leaves at the end of a step, losing nothing."""
        with self._leaving_on_sigterm():
            known = 0
            while (snapshot := self._newer(known)) is not None:
                known = snapshot.generation
                if self._follow(snapshot):
                    return

    def _newer(self, known: int) -> membership_pb2.Snapshot | None:
        """Wait for a snapshot newer than generation `known`, and return the newest one; None once the job is over.

        A newer snapshot that has already come is returned even then, as all nodes follow the snapshots that they have agreed on.
        A node that is to leave and has no place does not wait: the result is None.
        """
        while self._known() > known or not self._training.is_over:
            if self._leaves and not self._has_place and self._known() <= known:
                log.info("leaves without a place %s", pairs(**self._who, generation=known))
                self._is_done = False  # it may have been given a place at this moment
                return None
            try:
                return self._membership.wait(known, timeout_s=0.2)
            except TimeoutError:
                continue
        return None

    def _follow(self, snapshot: membership_pb2.Snapshot) -> bool:
        """Train under a snapshot, or save if it ends training. Return whether nothing is left to do."""
        log.info(
            "follows %s",
            pairs(**self._who, generation=snapshot.generation, nodes=len(snapshot.nodes), change=snapshot.change),
        )
        if not snapshot.pipelines:
            return self._end(snapshot)
        layout = Layout.of(snapshot, self._node, self._training.spec, self._process)
        self._has_place = layout is not None
        if layout is None:
            log.info("no place %s", pairs(**self._who, generation=snapshot.generation))
            self._training.forget()
            return self._leaves
        mesh = self._mesh_of(snapshot, layout.rank)
        try:
            return self._train(layout, mesh, snapshot)
        except MeshCutError as err:
            log.info("cut off %s", pairs(**self._who, generation=layout.generation, why=err))
            if self._training.is_done:
                return True
            self._await_notice(layout.generation, err)
            return False
        finally:
            self._close_mesh()

    def _train(self, layout: Layout, mesh: Mesh, snapshot: membership_pb2.Snapshot) -> bool:
        """Train under a layout. Return whether the job is over; if not, there is a newer snapshot to follow."""
        if self._known() > layout.generation:
            return False
        phases = self._training.prepare(layout, mesh)
        with self._lock:
            self._urgent_only = True
        if self._membership.urgent > layout.generation:
            mesh.cut()
        where = {"unit": layout.place.unit, "pipeline": layout.pipeline, "stage": layout.place.stage}
        took = {f"{name}_s": seconds for name, seconds in phases.items()}
        next_step = self._training.next_step
        log.info("training %s", pairs(**self._who, generation=layout.generation, step=next_step, **where, **took))
        if layout.rank == 0:
            first_step = self._training.first_own_step
            formation = membership_pb2.Formation(
                generation=layout.generation, first_step=first_step, pipelines=snapshot.pipelines
            )
            self._membership.recovered(formation, next_step, phases)
        is_over = self._training.run(self._known)
        if is_over:
            self._training.save()
        return is_over

    def _end(self, snapshot: membership_pb2.Snapshot) -> bool:
        """Save the model together with the nodes that are left. Return whether that is done; if not, another node was lost.

        Raises UnrecoverableError if training cannot go on, or a part of the model is lost.
        """
        names, why, saved = [node.name for node in snapshot.nodes], snapshot.error, ""
        if self._node in names:
            rank = names.index(self._node) * self._training.spec.gpus_per_node + self._process
            try:
                saved = self._training.rescue(self._mesh_of(snapshot, rank), snapshot.generation)
            except UnrecoverableError as err:
                why, saved = why or "nodes were lost after the last step, before all had saved the model", str(err)
            except MeshCutError as err:
                log.info("cut off %s", pairs(**self._who, generation=snapshot.generation, why=err))
                self._await_notice(snapshot.generation, err)
                return False
            finally:
                self._close_mesh()
        if why:
            raise UnrecoverableError(f"{why}; {saved}" if saved else why)
        return True

    def _mesh_of(self, snapshot: membership_pb2.Snapshot, rank: int) -> Mesh:
        name = f"{self._training.job}/{snapshot.generation}"
        timeout = STEP_TIMEOUT if is_rerouted(snapshot) else MEET_TIMEOUT  # nodes finish their share before they come
        num_ranks = len(snapshot.nodes) * self._training.spec.gpus_per_node
        mesh = Mesh(snapshot.nodes[0].address, name, rank, num_ranks, self._host, timeout)
        with self._lock:
            # After a rerouted snapshot, the next one follows as soon as the first node is ready. It must not cut the mesh, as
            # the other nodes may be just behind.
            self._mesh, self._running, self._urgent_only = mesh, snapshot, is_rerouted(snapshot)
        return mesh

    def _known(self) -> int:
        """Return the generation of the newest snapshot that has come; 0 if there was none."""
        newest = self._membership.newest
        return 0 if newest is None else newest.generation

    def _await_notice(self, generation: int, err: MeshCutError) -> None:
        """Wait, after a connection ended, for the snapshot that explains it, and ask for one if none comes.

        Raises HeadraceError if the reorder service does not answer.
        """
        if self._membership.urgent <= generation < self._known():  # the newer one is not urgent, so it is not about the loss
            with suppress(TimeoutError):
                self._membership.wait(self._known(), timeout_s=LOSS_S)
        for _ in range(NOTICES):
            try:
                self._membership.wait(generation, timeout_s=NOTICE_S)
            except TimeoutError:
                self._membership.cut_off(generation)
            else:
                return
        raise HeadraceError(f"{err}; and the reorder service has said nothing of it for {NOTICES * NOTICE_S:g} s") from err

    def _close_mesh(self) -> None:
        with self._lock:
            mesh, self._mesh, self._urgent_only = self._mesh, None, False
        if mesh is not None:
            mesh.close()

    def _watch(self) -> None:
        """Watch for snapshots, and cut the mesh when a newer one makes it useless. Runs in a thread of its own."""
        seen = 0
        while not self._over.is_set():
            try:
                snapshot = self._membership.wait(seen, timeout_s=1.0)
            except TimeoutError:
                continue
            except HeadraceError as err:
                log.debug("no more snapshots: %s", err)
                with self._lock:
                    if self._mesh is not None and not self._over.is_set():
                        self._mesh.cut()  # nothing else ends the waits of a process that the service has let go
                return
            seen = snapshot.generation
            with self._lock:
                running = self._running
                if self._mesh is not None and (snapshot.urgent if self._urgent_only else seen) > running.generation:
                    self._mesh.cut(but_pipelines=self._urgent_only and finishes_step_first(self._node, running, snapshot))

    @contextmanager
    def _leaving_on_sigterm(self) -> Iterator[None]:
        def leave(_: int, __: FrameType | None) -> None:
            self._leaves = True
            self._membership.leave()

        former = signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, former)
