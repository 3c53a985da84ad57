"""FSDP ranks with an exchange behind each encoder compute what one process does, whoever has which samples in which unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.verify.fsdp_cases import BOTH, FsdpCase, one_process, row_of
from tests.verify.fsdp_comparison import TOLERANCE, fsdp_differences
from tests.verify.fsdp_processes import FsdpOrder, fsdp_processes
from tests.verify.processes import TIMEOUT_S, Processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(TIMEOUT_S)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "orchestrated_fsdp.py"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    with fsdp_processes() as running:
        yield running


FEW = partial(FsdpCase, layers=1, samples=8)


def test_loss_gradients_and_weights_are_those_of_one_process(ranks: Processes) -> None:
    """These few have most choices once; `make verify` has every combination."""
    for case in (FEW(2, BOTH, "all learn", "orchmllm", 2), FEW(2, ("audio",), "only the llm", "random", 1)):
        assert fsdp_differences(ranks, case) == [], str(case)


def test_ranks_without_media_or_samples_run_what_the_others_run(ranks: Processes) -> None:
    case = FEW(4, ("vision",), "only projectors", "orchmllm", 1, samples=3, moved="hoarded")
    assert fsdp_differences(ranks, case) == []


def test_samples_that_are_refused_behind_the_plan_leave_no_rows_on_either_side(ranks: Processes) -> None:
    case = FEW(2, BOTH, "frozen llm", "llm-only", 1, refused=3)
    assert fsdp_differences(ranks, case) == []


def test_where_all_samples_of_an_encoder_are_refused_its_weights_stay(ranks: Processes) -> None:
    case = FEW(2, BOTH, "all learn", "orchmllm", 1, refused=7)
    assert not any(len(row_of(sample, BOTH)["mel_frames"]) for sample in case.sample_ids(1)[7:])
    assert fsdp_differences(ranks, case) == []


def test_layers_run_on_padded_rows_or_with_padded_attention_as_the_job_says(ranks: Processes) -> None:
    padded, fourth = FEW(2, BOTH, "all learn", "orchmllm", 2), FEW(2, BOTH, "frozen encoder", "orchmllm", 1)
    for case in (replace(padded, form="padded", dropout=0.2), replace(fourth, form="fourth")):
        assert fsdp_differences(ranks, case) == [], str(case)


def test_ranks_that_share_sequences_have_the_gradients_of_one_process(ranks: Processes) -> None:
    """Each on one to four of them, as they are planned; and a sample that all of its ranks find refused."""
    case = FEW(4, BOTH, "all learn", "auto", 1, samples=7, cp="auto", dropout=0.2)
    assert {case.plan(0).degrees.get(sample, 1) for sample in case.sample_ids(0)} == {1, 2, 3, 4}
    for one in (case, replace(case, cp=2, microbatches=2, refused=1, checkpointing=True)):
        assert fsdp_differences(ranks, one) == [], str(one)


@pytest.mark.slow
def test_in_bfloat16_it_is_about_the_same(ranks: Processes) -> None:
    case = FsdpCase(2, BOTH, "all learn", "orchmllm", 2, dtype="bfloat16")
    results, gradients, _ = one_process(replace(case, ranks=1, strategy="random", microbatches=1))
    answers = ranks.run(FsdpOrder(case))
    assert [one.loss for one in answers[0].results] == pytest.approx([one.loss for one in results], rel=2e-2)
    for name, gradient in answers[0].gradients.items():
        assert np.abs(gradient - gradients[name]).max() < 0.3 * np.abs(gradients[name]).max(), name


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "shards"), [(4, 2, None), (1, 4, 2), (4, 1, None)])
def test_a_checkpoint_goes_on_on_another_number_of_ranks(
    ranks: Processes, tmp_path: Path, before: int, after: int, shards: int | None
) -> None:
    case = FsdpCase(before, BOTH, "all learn", "orchmllm", 2)
    ranks.run(FsdpOrder(case, save_to=str(tmp_path), steps=(0,)))
    case = replace(case, ranks=after, shard_ranks=shards)
    answers = ranks.run(FsdpOrder(case, load_from=str(tmp_path), steps=(1,)))
    results, _, weights = one_process(replace(case, ranks=1, strategy="random", microbatches=1, shard_ranks=None))
    assert answers[0].results[0].loss == pytest.approx(results[1].loss, rel=TOLERANCE)
    for name, weight in answers[0].weights.items():
        assert np.abs(weight - weights[name]).mean() < TOLERANCE * np.abs(weights[name]).mean() + 2e-6, name


@pytest.mark.slow
def test_modules_of_ones_own_train_on_any_number_of_ranks_as_on_one(ranks: Processes) -> None:
    answers = {}
    for count, strategy in ((1, "random"), (2, "orchmllm"), (4, "llm-only")):
        case = FsdpCase(count, ("vision",), "all learn", strategy, 2)
        answers[count] = ranks.run(FsdpOrder(case, module=str(EXAMPLE)))[0]
    for count in (2, 4):
        assert [one.loss for one in answers[count].results] == pytest.approx([one.loss for one in answers[1].results], rel=1e-5)
        for name, gradient in answers[count].gradients.items():
            error = np.abs(gradient - answers[1].gradients[name]).max()
            assert error < TOLERANCE * np.abs(answers[1].gradients[name]).max(), name
