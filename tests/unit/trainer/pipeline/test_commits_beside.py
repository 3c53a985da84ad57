"""A pipeline's process trains a step while the one before is committed, and no further."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headrace import message_codec
from headrace.errors import ConflictError
from headrace.plan import Microbatch, StepPlan, Topology
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.steps import Step
from headrace.trainer.pipeline.cargo import Cargo
from headrace.trainer.pipeline.chunk import Inputs
from headrace.trainer.pipeline.feed import PipelineLoader, StepFeed
from headrace.trainer.pipeline.routes import Portion, Routes
from headrace.trainer.pipeline.topology import PipelineTopology
from headrace.v1 import sessions_pb2
from tests.unit.proto.transport import payload_world
from tests.unit.trainer.loading.loader_world import World


@pytest.fixture
def world() -> Iterator[World]:
    """Commits are not answered until a test says so."""
    world = World(payload_world.Producer(16 << 20))
    world.answers.clear()
    yield world
    world.answers.set()
    world.stop()


@pytest.fixture
def loader(world: World) -> Iterator[PipelineLoader]:
    topology = PipelineTopology.model_validate({"units": {"llm": {}}})
    loader = PipelineLoader(world.endpoint, job="job", topology=topology, place=topology.place(0), device=torch.device("cpu"))
    with loader:
        yield loader
        world.answers.set()


def tell(world: World, *steps: int) -> None:
    """Plans of steps of one sample."""
    for step in steps:
        sample, ticket = 100 * step, f"{step}/0"
        topology = Topology(replicas=1, microbatches=1, stages={"llm": 1})
        microbatch = Microbatch(units={"llm": (sample,)})
        plan = StepPlan(strategy="by hand", seed=0, topology=topology, replicas=[[microbatch]])
        part = sessions_pb2.RankMicrobatch(
            replica=0, index=0, tickets=[ticket], parts=[sessions_pb2.PartSamples(sample_ids=[sample])], num_samples=1
        )
        whole = message_codec.plan_message(plan)
        told = sessions_pb2.RankPlan(step=step, microbatches=[part], num_samples=1, whole=whole)
        world.hold(ticket)
        world.tell(sessions_pb2.PlanEvent(plan=told), world.place(ticket))


def prepare(routes: Routes, portion: Portion, data: PackedMicrobatch) -> Cargo:
    return Cargo(inputs=[Inputs(num_rows=len(data.input_ids), layers=data.sample_ids.tolist())])


def train(steps: Iterator[tuple[Step, StepFeed]]) -> tuple[Step, StepFeed]:
    """Take the next step, and its data."""
    step, feed = next(steps)
    (portion,) = feed.routes.portions("llm", 0)
    assert feed(portion).inputs[0].layers == [100 * step.index]
    return step, feed


def test_a_step_is_trained_while_the_one_before_is_committed(world: World, loader: PipelineLoader) -> None:
    tell(world, 0, 1)
    steps = loader.steps(prepare)
    loader.commit_fed(*train(steps), loss=1.0, measured=())
    second = train(steps)
    assert world.commits == []
    world.answers.set()
    loader.commit_fed(*second, loss=1.0, measured=())
    loader.settle()
    assert world.commits == [0, 1]
    assert loader.state_dict()["step"] == 2


def test_at_most_one_commit_is_open_and_a_checkpoint_waits_for_it(world: World, loader: PipelineLoader) -> None:
    tell(world, 0, 1)
    steps = loader.steps(prepare)
    loader.commit_fed(*train(steps), loss=1.0, measured=())
    second, may_save = train(steps), threading.Event()

    def go_on() -> None:
        loader.commit_fed(*second, loss=1.0, measured=())
        assert 0 in world.commits
        loader.settle()
        may_save.set()

    with ThreadPoolExecutor(1) as pool:
        goes_on = pool.submit(go_on)
        assert not may_save.is_set()
        assert loader.state_dict()["step"] == 0
        world.answers.set()
        goes_on.result(10)
    assert world.commits == [0, 1]


def test_a_step_that_is_planned_only_behind_a_commit_is_waited_for(world: World, loader: PipelineLoader) -> None:
    tell(world, 0)
    loader.spec = loader.spec.model_copy(update={"window": 1})
    steps = loader.steps(prepare)
    loader.commit_fed(*train(steps), loss=1.0, measured=())
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(train, steps)
        world.answers.set()
        world.wait(lambda: world.commits == [0])
        tell(world, 1)
        assert following.result(10)[0].index == 1


@pytest.mark.parametrize("planned", [True, False])
def test_a_commit_that_fails_ends_the_training(world: World, loader: PipelineLoader, planned: bool) -> None:
    """With the commit of the step behind it, or where that is not even planned, while its plan is waited for."""
    tell(world, *range(1 + planned))
    steps = loader.steps(prepare)
    loader.commit_fed(*train(steps), loss=1.0, measured=())
    world.refuses = True
    world.answers.set()
    with pytest.raises(ConflictError, match="the test refuses commits"):
        loader.commit_fed(*train(steps), loss=1.0, measured=())
    with pytest.raises(ConflictError, match="the test refuses commits"):
        loader.settle()
