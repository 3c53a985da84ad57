"""What every strategy owes its caller: a complete, valid, reproducible plan, or one sentence that says what is wrong."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import spec
from headrace.plan import StepPlan, Topology
from headrace.reorder_service.planning import STRATEGIES, plan, warm_up
from headrace.reorder_service.planning.batch import make_batch, slots_of
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.simulation.simulator import simulate
from headrace.reorder_service.planning.simulation.work import Work
from tests.examples import with_examples

EVERY = sorted(STRATEGIES)
SHAPES = {
    "tiny": lambda rng, n: np.full(n, 5e-324),
    "heavy": lambda rng, n: rng.pareto(1.2, n),
    "constant": lambda rng, n: np.full(n, 2.0),
    "zero": lambda rng, n: np.zeros(n),
    "one huge": lambda rng, n: np.where(np.arange(n) == rng.integers(n), 1e9, rng.random(n)),
    "ties": lambda rng, n: rng.integers(0, 3, n).astype(np.float64),
}


@st.composite
def batches(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(1, 40))
    units = ["vision", "audio", "video"][: draw(st.integers(0, 3))] + ["llm"] + ["generator"] * draw(st.integers(0, 1))
    stages = {unit: draw(st.integers(1, 3)) for unit in units}
    topology = Topology(replicas=draw(st.integers(1, 5)), microbatches=draw(st.integers(1, 6)), stages=stages)
    costs = {unit: SHAPES[draw(st.sampled_from(sorted(SHAPES)))](rng, n) for unit in stages}
    return rng.permutation(1000)[:n], costs, topology


@pytest.mark.parametrize("strategy", EVERY)
@with_examples(60)
@given(batch=batches())
def test_every_sample_stands_once_in_every_unit_of_a_valid_plan(strategy: str, batch) -> None:
    ids, costs, topology = batch
    planned = plan(strategy, ids, costs, topology, seed=7, generation=3)

    planned.check()
    assert (planned.strategy, planned.seed, planned.generation, planned.topology) == (strategy, 7, 3, topology)
    assert [len(replica) for replica in planned.replicas] == [topology.microbatches] * topology.replicas
    for unit in topology.stages:
        placed = [i for replica in planned.replicas for microbatch in replica for i in microbatch.units[unit]]
        assert sorted(placed) == sorted(ids.tolist())
    for replica in planned.replicas:
        filled = [any(microbatch.units.values()) for microbatch in replica]
        assert filled == sorted(filled, reverse=True), "empty microbatches come last"
        if len(ids) >= topology.replicas:
            assert any(filled), "no replica stays idle while there are samples enough"
    row = {sample_id: i for i, sample_id in enumerate(ids.tolist())}
    for replica in planned.replicas:
        for microbatch in replica:
            rows = [row[i] for i in microbatch.sample_ids]
            assert rows == sorted(rows), "samples of a microbatch stand in arrival order"

    assert planned == plan(strategy, ids, costs, topology, seed=7, generation=3)
    assert StepPlan.from_json(json.loads(json.dumps(planned.to_json()))) == planned


@pytest.mark.parametrize("strategy", EVERY)
@with_examples(30)
@given(batch=batches())
def test_the_prediction_is_the_simulators_word_on_the_finished_plan(strategy: str, batch) -> None:
    ids, costs, topology = batch
    planned = plan(strategy, ids, costs, topology, seed=0)
    simulated = simulate(Work.of(make_batch(ids, costs, topology, 0), slots_of(planned, ids)))
    assert planned.predicted is not None
    for name in ("iteration_s", "bubble", "lower_bound_s"):
        assert getattr(planned.predicted, name) == pytest.approx(getattr(simulated, name), rel=1e-9, abs=1e-9)


def replicas_of(planned: StepPlan) -> dict[int, set[int]]:
    """Of every sample, over all units."""
    found: dict[int, set[int]] = {}
    for number, replica in enumerate(planned.replicas):
        for sample in (sample for microbatch in replica for samples in microbatch.units.values() for sample in samples):
            found.setdefault(sample, set()).add(number)
    return found


@pytest.mark.parametrize("strategy", [strategy for strategy in EVERY if strategy not in spec.CROSS_REPLICA_STRATEGIES])
@with_examples(60)
@given(batch=batches())
def test_a_sample_stays_on_its_replica(strategy: str, batch) -> None:
    planned = plan(strategy, *batch, seed=0)
    assert all(len(replicas) == 1 for replicas in replicas_of(planned).values())


def test_auto_takes_a_plan_that_crosses_replicas_only_where_one_can_be_run() -> None:
    rng = np.random.default_rng(10)
    costs = {"vision": rng.lognormal(0, 1.2, 32) * (rng.random(32) < 0.7) + 1e-4, "llm": rng.lognormal(0, 0.8, 32)}
    batch = np.arange(32), costs, Topology(replicas=2, microbatches=4, stages={"vision": 1, "llm": 1})
    free = plan("auto", *batch, seed=10, execution=Execution(may_cross_replicas=True))
    assert free.chosen == "orchmllm"
    assert any(len(replicas) > 1 for replicas in replicas_of(free).values())
    job = plan("auto", *batch, seed=10)
    assert all(len(replicas) == 1 for replicas in replicas_of(job).values())
    assert free.predicted is not None
    assert job.predicted is not None
    assert free.predicted.iteration_s < job.predicted.iteration_s


def test_random_deals_samples_in_arrival_order() -> None:
    ids = np.array([10, 11, 12, 13, 14, 15, 16])
    costs = {"encoder": np.ones(7), "llm": np.ones(7)}
    planned = plan("random", ids, costs, Topology(replicas=2, microbatches=2, stages={"encoder": 1, "llm": 1}), 0)
    dealt = [[list(microbatch.sample_ids) for microbatch in replica] for replica in planned.replicas]
    assert dealt == [[[10, 14], [12, 16]], [[11, 15], [13]]]


def test_the_job_spec_offers_these_strategies() -> None:
    assert set(spec.STRATEGIES) == set(STRATEGIES)


TOPOLOGY = Topology(replicas=2, microbatches=2, stages={"encoder": 1, "llm": 1})
GOOD = {"encoder": np.ones(4), "llm": np.ones(4)}


def with_value(value: float) -> dict[str, np.ndarray]:
    return {"encoder": np.ones(4), "llm": np.array([1.0, 1.0, value, 1.0])}


@pytest.mark.parametrize(
    ("ids", "costs", "sentence"),
    [
        ([], {"encoder": np.ones(0), "llm": np.ones(0)}, "at least one sample id"),
        ([[1, 2]], GOOD, r"shape \(1, 2\)"),
        ([1, 2, 3, 2], GOOD, r"2 stands in rows \[1, 3\]"),
        (range(4), {"encoder": np.ones(4)}, r"one column per unit of \['encoder', 'llm'\], got \['encoder'\]"),
        (range(4), GOOD | {"video": np.ones(4)}, "one column per unit"),
        (range(4), GOOD | {"llm": np.ones(3)}, r"'llm' must have one value per sample \(4\), got shape \(3,\)"),
        (range(4), with_value(float("nan")), "'llm' must be finite and not negative, but row 2 is nan"),
        (range(4), with_value(float("inf")), "'llm' must be finite and not negative, but row 2 is inf"),
        (range(4), with_value(-0.5), r"'llm' must be finite and not negative, but row 2 is -0\.5"),
        (range(4), with_value(1e308), "too large to add up: row 2"),
    ],
)
@pytest.mark.parametrize("strategy", EVERY)
def test_bad_input_is_refused_with_the_row_and_the_rule(strategy: str, ids, costs, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(strategy, np.array(list(ids), dtype=np.int64), costs, TOPOLOGY, seed=0)


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="no strategy 'best'; there are random, disttrain, entrain, orchmllm, joint, taper, auto"
    ):
        plan("best", np.arange(4), GOOD, TOPOLOGY, seed=0)


def test_after_warm_up_planning_compiles_nothing() -> None:
    modules = [value for name, value in sys.modules.items() if name.startswith("headrace.reorder_service.planning.")]
    kernels = {value for module in modules for value in vars(module).values() if hasattr(value, "signatures")}
    warm_up()
    compiled = {kernel: list(kernel.signatures) for kernel in kernels}
    assert os.environ.get("NUMBA_DISABLE_JIT") == "1" or len(compiled) >= 30
    rng = np.random.default_rng(0)
    ids = np.arange(50, dtype=np.int32)[::2]  # strided and narrow: what comes in is brought into one form first
    costs = {unit: rng.random(50)[::2] for unit in ("encoder", "llm")}
    for strategy in EVERY:
        plan(strategy, ids, costs, TOPOLOGY, seed=0)
        plan(strategy, ids[:1], {unit: column[:1] for unit, column in costs.items()}, TOPOLOGY, seed=0)
    assert {kernel: list(kernel.signatures) for kernel in kernels} == compiled


PROGRAM = """
import json
import numpy as np
from headrace.plan import Topology
from headrace.reorder_service.planning import STRATEGIES, plan
from headrace.reorder_service.planning.execution import Execution
from headrace.reorder_service.planning.search import arrangement, balance
balance.SEARCH_STEPS, arrangement.ACTION_BUDGET = 1000, 10_000  # interpreted code is slow
rng = np.random.default_rng(5)
costs = {unit: rng.lognormal(0, 1, 60) for unit in ("encoder", "llm")}
topology = Topology(replicas=3, microbatches=6, stages={"encoder": 1, "llm": 3})
for strategy in sorted(STRATEGIES):
    print(json.dumps(plan(strategy, np.arange(60), costs, topology, seed=0).to_json()))
for meet in ("microbatch", "step"):
    execution = Execution(colocated=meet, max_tokens=40)
    tokens = np.ceil(costs["llm"]).astype(int)
    print(json.dumps(plan("auto", np.arange(60), costs, topology, seed=0, execution=execution, tokens=tokens).to_json()))
"""


def test_interpreted_kernels_give_the_same_plans_to_the_last_bit() -> None:
    def output(**environment: str) -> str:
        command = [sys.executable, "-c", PROGRAM]
        run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=True)
        return run.stdout

    assert output(NUMBA_DISABLE_JIT="1") == output(NUMBA_DISABLE_JIT="0") != ""
