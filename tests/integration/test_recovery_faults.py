"""Nodes of a recoverable job that are lost at the places where most goes wrong. All places: `make chaos-trainer`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from headrace.cli.watch.top_figures import step_times
from headrace.jobs_client import JobsClient
from tests.chaos_trainer.__main__ import References, run_case
from tests.chaos_trainer.cases import Case, cases
from tests.chaos_trainer.cluster import Cluster
from tests.chaos_trainer.faults import Fault, Kind, Place, Where
from tests.chaos_trainer.run import Run
from tests.nursery.forked_commands import ForkedCommands

pytestmark = pytest.mark.integration

SELECTION = [
    "kill encoder 0 of pipeline 0 at backward 1 of step 2",
    "kill llm -1 of pipeline 0 at backward 1 of step 2, nodes of two processes",
]
SLOW_SELECTION = [
    "kill n5 at connect 1 of generation 2, a join",
    "kill llm 0 of pipeline 1 at forward 1 of step 2, rerouted",
    "disconnect rank 3 at updated 1 of step 4",
    "only the first node sees the outcome, and is lost before it commits",
    "kill encoder 0 of pipeline 1 at save 1 of generation 3, a rescue",
    "stop llm 0 of pipeline 0 at voting 1 of step 2 for 1.6 s",
    "leave rank 0 at forward 1 of step 2",
    "kill llm 0 of pipeline 0 at compare 1 of step 2",
    "kill rank 0 at evaluate 2 of step 1",
    "kill encoder 0 of pipeline 1 at evaluate 2 of step 1",
    "stop llm 0 of pipeline 1 at backward 1 of step 2, rerouted",
    "kill n4 at forward 1 of step 2 then kill rank 0 at commit 1 of step 3",
    "kill rank 0 at save 1 of generation 1",
    "kill encoder 0 of pipeline 1 at agree 1 of generation 2 with its layers",
    "stop llm 0 of pipeline 0 at voting 1 of step 2 for 1.6 s, nodes of two processes",
    "leave rank 3 at forward 1 of step 2, nodes of two processes",
    "kill n1 at backward 1 of step 2 then hold rank 0 at begin 1 of step 3, back again, nodes of two processes",
    "kill llm -1 of pipeline 0 at backward 1 of step 2, an llm of transformers",
    "a join, an llm of transformers",
]
CASES = [
    *(pytest.param(case, id=case.name) for case in cases() if case.name in SELECTION),
    *(pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in cases() if case.name in SLOW_SELECTION),
]


@pytest.fixture(scope="module")
def standing(forked_commands: ForkedCommands) -> Iterator[tuple[Cluster, References]]:
    with Cluster(nursery=forked_commands.nursery) as cluster:
        yield cluster, References(cluster)


@pytest.mark.parametrize("case", CASES)
def test_a_lost_node_changes_nothing(standing: tuple[Cluster, References], case: Case) -> None:
    cluster, references = standing
    _, wrong = run_case(cluster, references, case)
    assert not wrong


def test_what_nodes_wait_for_and_what_their_stages_take_is_told(standing: tuple[Cluster, References]) -> None:
    cluster, _ = standing
    run = Run(cluster, Case(name="undisturbed", steps=9))  # the first correction holds from step 8 on
    assert not run.run().errors
    with JobsClient(cluster.endpoint) as client:
        status = client.show(run.folder.name)
    assert 0 < status.data_wait_s < status.step_s
    assert step_times(status)["forecast_step_s"], "costs are corrected by what the nodes have measured"


def test_a_weight_that_changes_on_one_node_is_told_by_all(standing: tuple[Cluster, References]) -> None:
    cluster, _ = standing
    drift = Fault(kind=Kind.DRIFT, place=Place.UPDATED, where=Where(node="n3"), step=1)
    run = Run(cluster, Case(name=str(drift), faults=(drift,)))
    run.run()
    sentence = r"after step 1 nodes (\S+) have other weights than node (\S+), first in \w+\.\S+: they no longer train one model"
    found = [re.findall(sentence, (run.folder / f"n{number}.log").read_text()) for number in range(5)]
    assert found == [found[0]] * 5
    ((those, one),) = found[0]
    assert "n3" in (those, one)


def test_every_case_has_a_name_of_its_own() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert {*SELECTION, *SLOW_SELECTION} <= set(names)
