"""Context parallelism over gloo ranks, beside one process: attention, a whole model, a step, and the documented loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.trainer.context.context_ranks import Run, run
from tests.verify import context_attention, context_models
from tests.verify.context_comparison import context_differences
from tests.verify.context_processes import ContextCase, context_processes
from tests.verify.processes import TIMEOUT_S, Processes

pytestmark = pytest.mark.timeout(TIMEOUT_S)

CLOSE = 1e-5


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with context_processes() as running:
        yield running


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("context"))


@pytest.mark.parametrize("case", context_attention.FEW, ids=str)
def test_attention_over_ranks_equals_the_formula_of_one(processes: Processes, case: ContextCase) -> None:
    """`make verify` has every combination."""
    assert context_differences(processes, case) == []


@pytest.mark.parametrize("name", context_models.CASES)
def test_loss_and_gradients_are_those_of_one_process(processes: Processes, name: str) -> None:
    assert context_differences(processes, context_models.CASES[name]) == []


def test_a_step_over_two_groups_of_two_ranks_is_that_of_one_process(ranks: Run) -> None:
    """One of four ranks has all targets of its group; its partner meets it in the backward nevertheless."""
    loss, weight, norm = context_models.one_step(context_models.STEP, None)
    for answer in ranks:
        assert answer["step"][0] == pytest.approx(loss, rel=CLOSE)
        assert answer["step"][1] == pytest.approx(weight)
        assert answer["step"][2] == pytest.approx(norm, rel=CLOSE)


def test_the_documented_loop_has_the_same_losses_on_three_ranks_as_on_one(ranks: Run) -> None:
    alone = ranks[0]["example on 1"]
    assert alone[2] < alone[0]
    for answer in ranks[:3]:
        assert answer["example on 3"] == pytest.approx(alone, rel=CLOSE)
