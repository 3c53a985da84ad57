"""The optimizer of a pipeline: sharded over replicas, in bfloat16, and from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.plan import Topology
from headrace.reorder_service.planning.strategies import plan
from headrace.spec import parse
from headrace.trainer.pipeline.topology import PipelineTopology
from tests.verify.batches import costs_of, make_row
from tests.verify.processes import TIMEOUT_S, Answer, Order, Processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(TIMEOUT_S)]

SAMPLES, MICROBATCHES = 9, 2
REPLICATED = {"units": {"vision": {}, "llm": {"dp": 3}}}
CUT = {"units": {"vision": {"tp": 2}, "llm": {"pp": 2}}}


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(4) as running:
        yield running


def steps(
    processes: Processes,
    numbers: range,
    document: dict[str, Any] = REPLICATED,
    *,
    learning_rate: float = 1e-3,
    **options: str,
) -> list[Answer]:
    topology = parse(PipelineTopology, document, "topology")
    planned = Topology(replicas=topology.units["llm"].dp, microbatches=MICROBATCHES, stages=topology.stages)
    plans = []
    for number in numbers:
        rows = [make_row(100 * number + sample, audio=False) for sample in range(SAMPLES)]
        ids = np.array([row["sample_id"] for row in rows])
        plans.append(plan("disttrain", ids, costs_of(rows, topology.stages), planned, seed=number).to_json())
    return processes.run(Order(document, plans, False, learning_rate, **options))


def same(some: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> bool:
    return some.keys() == others.keys() and all(np.array_equal(some[name], others[name]) for name in some)


@pytest.mark.slow
def test_replicas_agree_to_the_bit_and_every_parameter_is_written_by_one(processes: Processes) -> None:
    _, *replicas = steps(processes, range(3))
    assert all(same(replica.weights, replicas[0].weights) for replica in replicas)
    for name in replicas[0].gradients:
        assert sum(name in replica.moments for replica in replicas) == 1


def test_a_run_from_a_checkpoint_is_the_run_that_went_on(processes: Processes, tmp_path: Path) -> None:
    whole = steps(processes, range(4))
    steps(processes, range(2), save_to=str(tmp_path))
    resumed = steps(processes, range(2, 4), load_from=str(tmp_path), save_to=str(tmp_path))
    for before, after in zip(whole, resumed, strict=True):
        assert before.results[-2:] == after.results[-2:]
        assert same(before.weights, after.weights)
        assert same(before.moments, after.moments)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002", "step-00000004"}


@pytest.mark.slow
def test_a_frozen_unit_in_half_precision_is_saved_and_loaded_as_it_is(processes: Processes, tmp_path: Path) -> None:
    frozen = {"units": {"vision": {"frozen": True, "tp": 2}, "llm": {"pp": 2}}}
    whole = steps(processes, range(3), frozen, dtype="bfloat16")
    steps(processes, range(1), frozen, dtype="bfloat16", save_to=str(tmp_path))
    resumed = steps(processes, range(1, 3), frozen, dtype="bfloat16", load_from=str(tmp_path))
    for before, after in zip(whole, resumed, strict=True):
        assert before.results[-2:] == after.results[-2:]
        assert same(before.weights, after.weights)


@pytest.mark.slow
def test_a_checkpoint_is_loaded_into_another_topology_and_back(processes: Processes, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    whole = steps(processes, range(3))
    steps(processes, range(1), save_to=str(there))
    cut = steps(processes, range(1, 2), CUT, load_from=str(there), save_to=str(back))
    resumed = steps(processes, range(2, 3), load_from=str(back))
    assert cut[0].results[-1].loss == pytest.approx(whole[0].results[-2].loss, rel=1e-5)
    assert resumed[0].results[-1].loss == pytest.approx(whole[0].results[-1].loss, rel=1e-4)


def test_replicas_that_keep_a_third_of_the_weights_each_learn_the_same_and_go_on_from_each_others_checkpoints(
    processes: Processes, tmp_path: Path
) -> None:
    sharded = {"units": {"vision": {}, "llm": {"dp": 3, "shard_weights": True}}}
    whole = steps(processes, range(3))
    first = steps(processes, range(1), sharded, save_to=str(tmp_path / "sharded"))
    others = steps(processes, range(1, 3), REPLICATED, load_from=str(tmp_path / "sharded"), save_to=str(tmp_path / "whole"))
    assert close(first[1:], whole[1:], results=2)
    assert close(others[1:], whole[1:], weights=True)
    steps(processes, range(1), save_to=str(tmp_path / "first"))
    resumed = steps(processes, range(1, 3), sharded, load_from=str(tmp_path / "first"))
    assert close(resumed[1:], whole[1:], weights=True)
    shares = [answer.bytes_at_rest / other.bytes_at_rest for answer, other in zip(resumed[1:], whole[1:], strict=True)]
    assert shares == pytest.approx([1 / 3] * 3, rel=0.01)


def test_ranks_that_share_sequences_update_equal_shares_and_go_on_from_others_checkpoints(
    processes: Processes, tmp_path: Path
) -> None:
    shared = {"units": {"vision": {}, "llm": {"cp": 3}}}
    whole = steps(processes, range(3))
    first = steps(processes, range(1), shared, save_to=str(tmp_path / "shared"))
    others = steps(processes, range(1, 3), load_from=str(tmp_path / "shared"), save_to=str(tmp_path / "whole"))
    last = steps(processes, range(3, 4), shared, load_from=str(tmp_path / "whole"))
    assert first[0].results[-1].loss == pytest.approx(whole[0].results[1].loss, rel=1e-5)
    assert close(others[1:], whole[1:], weights=True)
    for name in first[1].gradients:
        assert sum(name in answer.moments for answer in first[1:]) == 1, "each parameter is written by one"
    assert all(same(answer.weights, last[1].weights) for answer in last[2:])


def close(some: list[Answer], others: list[Answer], *, results: int = 0, weights: bool = False) -> bool:
    """Up to the order of sums. results: number of the first results that are compared; 0: the last two."""
    for one, other in zip(some, others, strict=True):
        ours, theirs = ([result.loss for result in (a.results[:results] if results else a.results[-2:])] for a in (one, other))
        if ours != pytest.approx(theirs, rel=1e-5):
            return False
        if weights and any(np.abs(one.weights[name] - weight).max() > 1e-5 for name, weight in other.weights.items()):
            return False
    return True


def test_bfloat16_learns_as_float32_does(processes: Processes) -> None:
    exact, rounded = (steps(processes, range(2), dtype=dtype)[0].results for dtype in ("float32", "bfloat16"))
    assert [result.loss for result in rounded] == pytest.approx([result.loss for result in exact], rel=0.03)
    assert rounded[0].loss != exact[0].loss


def test_a_step_that_is_not_finite_is_the_error_of_every_process(processes: Processes) -> None:
    with pytest.raises(RuntimeError) as caught:
        steps(processes, range(2), CUT, learning_rate=1e30)
    said = [line for line in str(caught.value).splitlines() if "HeadraceError: the step is not finite (loss" in line]
    assert len(said) == 4
