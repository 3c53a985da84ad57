"""Nodes whose pipelines are cut differently compare the weights that they have in common."""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch

from headrace.errors import HeadraceError
from headrace.trainer.models.multimodal import initialise
from headrace.trainer.recovery.held_layers import Holding, make_holding
from headrace.trainer.recovery.layout import Layout
from headrace.trainer.recovery.mesh import Meeting, Mesh
from headrace.trainer.recovery.nodes_spec import RecoverableUnit, RecoverySpec
from headrace.trainer.recovery.recoverable_step import RecoverableStep
from headrace.trainer.train_step import DEFAULTS, SkipPolicy
from headrace.v1.membership_pb2 import Node, Pipeline, PipelineStage, Snapshot
from tests.verify.batches import whole_model

pytestmark = pytest.mark.integration

PATIENCE = timedelta(seconds=100)  # with processes that import torch
DRIFTED = "decoder.layers.4.mlp.gate_up.weight"
TIED = "decoder.embed.weight"  # the head, too: in the first and in the last stage
SPEC = RecoverySpec(nodes=3, units={"llm": RecoverableUnit()})


def stage(rank: int, first: int, end: int) -> PipelineStage:
    return PipelineStage(rank=rank, unit="llm", first_layer=first, end_layer=end)


PIPELINES = [Pipeline(stages=[stage(0, 0, 6)]), Pipeline(stages=[stage(1, 0, 2), stage(2, 2, 6)])]
SNAPSHOT = Snapshot(generation=1, nodes=[Node(name=name) for name in "abc"], pipelines=PIPELINES)


def holders_of(name: str) -> list[int]:
    """The ranks that have a weight of the LLM."""
    if name == TIED:
        return [0, 1, 2]
    return [0, 1] if name.startswith(("decoder.layers.0.", "decoder.layers.1.")) else [0, 2]


HOLDERS = {name: holders_of(name) for name, _ in whole_model().named_parameters() if name.startswith("decoder.")}


def flip_a_bit(holding: Holding, name: str) -> None:
    holding.parameters[name].detach().view(torch.int32)[0, 0] ^= 1


def said(step: RecoverableStep, after: int | None) -> str:
    """What the comparison raises; "" where nothing."""
    try:
        step.check_replicas(after)
    except HeadraceError as err:
        return f"{type(err).__name__}: {err}"
    return ""


def compare(name: str, address: str, pipe: Connection) -> None:
    """A node: all have the same weights, then c's drift, then b's are others from the beginning, and then c is lost."""
    layout = Layout.of(SNAPSHOT, name, SPEC)
    assert layout is not None
    mesh = Mesh(address, "1", layout.rank, layout.num_ranks, "127.0.0.1", PATIENCE)
    mesh.connect()
    holding = make_holding(layout, whole_model, DEFAULTS, device=torch.device("cpu"))
    initialise(holding.stage.model, 0)
    step = RecoverableStep(layout, mesh, holding, HOLDERS, SkipPolicy(DEFAULTS))
    pipe.send(said(step, 99))
    if name == "c":
        flip_a_bit(holding, DRIFTED)
    pipe.send(said(step, 199))
    if name == "b":
        flip_a_bit(holding, TIED)
    pipe.send(said(step, None))
    if name == "c":
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.send(said(step, 299))
    mesh.close()


def test_a_weight_that_differs_is_named_with_its_nodes_and_a_lost_node_holds_nobody_up() -> None:
    meeting = Meeting("127.0.0.1")
    context = multiprocessing.get_context("forkserver")
    pairs = {node.name: context.Pipe() for node in SNAPSHOT.nodes}
    processes = [context.Process(target=compare, args=(name, meeting.address, pairs[name][1]), daemon=True) for name in pairs]
    for process in processes:
        process.start()

    def heard(names: str) -> set[str]:
        return {pairs[name][0].recv() for name in names}

    assert heard("abc") == {""}
    (drifted,) = heard("abc")
    assert drifted.startswith(f"HeadraceError: after step 199 nodes c have other weights than node a, first in {DRIFTED}: ")
    (other,) = heard("abc")
    assert other.startswith(f"UserError: nodes b begin with other weights than node a, first in {TIED}, and would never")
    assert {words.partition(":")[0] for words in heard("ab")} == {"MeshCutError"}
    for process in processes:
        process.join()
