"""Context parallelism over gloo ranks, beside one process: attention, a whole model, a step, and the documented loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.trainer.models.masked_attention import dense_attention
from tests.unit.trainer.context import attention_cases, model_cases
from tests.unit.trainer.context.attention_cases import Case
from tests.unit.trainer.context.context_ranks import Run, run
from tests.unit.trainer.context.model_cases import ModelCase, Outcome

CLOSE = 1e-5
HALF = 2e-2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("context"), wide=False)


@pytest.fixture(scope="module")
def wide_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("wide"), wide=True)


@pytest.mark.parametrize("case", attention_cases.FEW, ids=str)
def test_attention_over_ranks_equals_the_formula_of_one(ranks: Run, case: Case) -> None:
    assert_attention(ranks, case)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_attention_does_so_in_every_combination(wide_ranks: Run) -> None:
    for case in attention_cases.ALL:
        assert_attention(wide_ranks, case)


@pytest.mark.parametrize("name", model_cases.CASES)
def test_loss_and_gradients_are_those_of_one_process(ranks: Run, name: str) -> None:
    assert_outcomes(ranks, name, model_cases.CASES[name])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_they_are_so_in_every_combination(wide_ranks: Run) -> None:
    for name, case in model_cases.WIDE.items():
        assert_outcomes(wide_ranks, name, case)


def test_a_step_over_two_groups_of_two_ranks_is_that_of_one_process(ranks: Run) -> None:
    """One of four ranks has all targets of its group; its partner meets it in the backward nevertheless."""
    loss, weight, norm = model_cases.one_step(model_cases.STEP, None)
    for answer in ranks:
        assert answer["step"][0] == pytest.approx(loss, rel=CLOSE)
        assert answer["step"][1] == pytest.approx(weight)
        assert answer["step"][2] == pytest.approx(norm, rel=CLOSE)


def test_the_documented_loop_has_the_same_losses_on_three_ranks_as_on_one(ranks: Run) -> None:
    alone = ranks[0]["example on 1"]
    assert alone[2] < alone[0]
    for answer in ranks[:3]:
        assert answer["example on 3"] == pytest.approx(alone, rel=CLOSE)


def assert_attention(answers: Run, case: Case) -> None:
    (q, k, v), weights = case.inputs()
    mask = attention_cases.mask_of(case)
    whole = [x.float().requires_grad_() for x in (q, k, v)]
    output = dense_attention(*whole, mask)
    expected = [output.detach(), *torch.autograd.grad((output * weights.float()).sum(), whole)]
    found = attention_cases.joined(case, [answer[str(case)] for answer in answers[: case.cp]])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == q.dtype
        if case.dtype == "float32":
            torch.testing.assert_close(ours, theirs, atol=CLOSE, rtol=CLOSE)
        else:
            assert (ours.float() - theirs).norm() < HALF * theirs.norm()


def assert_outcomes(answers: Run, name: str, case: ModelCase) -> None:
    """On each rank of the case."""
    expected = model_cases.alone(case)
    for answer in answers[: case.cp]:
        assert_outcome(answer[name], expected)


def assert_outcome(outcome: Any, expected: Outcome) -> None:
    loss_sum, weight, gradients = outcome
    assert loss_sum == pytest.approx(expected[0], rel=CLOSE)
    assert weight == pytest.approx(expected[1])
    assert gradients.keys() >= expected[2].keys()
    for parameter, gradient in gradients.items():
        assert_gradient(gradient, expected[2].get(parameter, torch.zeros_like(gradient)))


def assert_gradient(ours: Tensor, theirs: Tensor) -> None:
    """Up to 1e-5 of the largest element."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=max(1e-6, CLOSE * float(theirs.abs().max())))
