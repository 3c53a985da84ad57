"""FSDP ranks with an exchange behind each encoder compute what one process does, whoever has which samples in which unit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.verify.fsdp_cases import FROZEN_SETS, MICROBATCHES, MODALITIES, RANKS, STRATEGIES, FsdpCase, one_process
from tests.verify.fsdp_processes import FsdpAnswer, FsdpOrder, fsdp_processes
from tests.verify.processes import TIMEOUT_S, Processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(TIMEOUT_S)]

BOTH = ("vision", "audio")
TOLERANCE = 1e-5
EXAMPLE = Path(__file__).parents[2] / "examples" / "orchestrated_fsdp.py"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    with fsdp_processes() as running:
        yield running


def differences(answers: list[FsdpAnswer], case: FsdpCase, tolerance: float = TOLERANCE) -> list[str]:
    """What is not as in one process, in words."""
    results, gradients, weights = one_process(replace(case, ranks=1, strategy="random", microbatches=1, moved=""))
    found = []
    for rank, answer in enumerate(answers):
        for number, (one, other) in enumerate(zip(answer.results, results, strict=True)):
            found += [
                f"rank {rank}, step {number}: {name} {getattr(one, name)}, not {getattr(other, name)}"
                for name in ("loss", "target_weight", "grad_norm")
                if not np.isclose(getattr(one, name), getattr(other, name), rtol=tolerance, atol=0)
            ]
        if answer.sent_bytes != answer.planned_bytes:
            found.append(f"rank {rank} has sent {answer.sent_bytes} bytes, and the plans say {answer.planned_bytes}")
    for kind, ours, theirs in (("gradient", answers[0].gradients, gradients), ("weight", answers[0].weights, weights)):
        if kind == "gradient" and ours.keys() != theirs.keys():
            found.append(f"gradients of {sorted(ours.keys() ^ theirs.keys())} on one side only")
        for name in theirs.keys() & ours.keys():
            error, size = np.abs(ours[name] - theirs[name]), np.abs(theirs[name])
            noise = 0.0 if kind == "gradient" else 2e-6  # Adam moves by a rate what has no gradient but rounding
            off = error.max() if kind == "gradient" else error.mean()
            least = size.max() if kind == "gradient" else size.mean()
            if off > tolerance * least + noise:
                found.append(f"{kind} of {name} is off by {off:.3g} of {least:.3g}")
    return found


FEW = partial(FsdpCase, layers=1, samples=8)


def test_loss_gradients_and_weights_are_those_of_one_process(ranks: Processes) -> None:
    """These few have most choices once; the slow tests have every combination."""
    for case in (FEW(2, BOTH, "all learn", "orchmllm", 2), FEW(2, ("audio",), "only the llm", "random", 1)):
        assert differences(ranks.run(FsdpOrder(case)), case) == [], str(case)


def test_ranks_without_media_or_samples_run_what_the_others_run(ranks: Processes) -> None:
    case = FEW(4, ("vision",), "only projectors", "orchmllm", 1, samples=3, moved="hoarded")
    assert differences(ranks.run(FsdpOrder(case)), case) == []


def test_samples_that_are_refused_behind_the_plan_leave_no_rows_on_either_side(ranks: Processes) -> None:
    case = FEW(2, BOTH, "frozen llm", "llm-only", 1, refused=3)
    assert differences(ranks.run(FsdpOrder(case)), case) == []


ALL = [FsdpCase(*choice) for choice in itertools.product(RANKS, MODALITIES, FROZEN_SETS, STRATEGIES, MICROBATCHES)]
OTHERS = [
    *(FsdpCase(4, BOTH, frozen, strategy, 2, moved="permuted") for frozen in FROZEN_SETS for strategy in STRATEGIES),
    *(FsdpCase(4, modality, frozen, "orchmllm", 2, moved="hoarded") for frozen in FROZEN_SETS for modality in MODALITIES),
    *(FsdpCase(4, BOTH, "all learn", "orchmllm", 2, refused=count) for count in (1, 3, 11)),
    FsdpCase(4, BOTH, "all learn", "orchmllm", 2, shard_ranks=2),
    FsdpCase(4, BOTH, "frozen encoder", "orchmllm", 2, shard_ranks=2),
    FsdpCase(2, BOTH, "all learn", "orchmllm", 2, checkpointing=True),
    FsdpCase(2, BOTH, "all learn", "orchmllm", 2, max_grad_norm=0.1),
    FsdpCase(2, BOTH, "all learn", "orchmllm", 2, dropout=0.2),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ALL, *OTHERS], ids=str)
def test_every_combination_is_as_in_one_process(ranks: Processes, case: FsdpCase) -> None:
    assert differences(ranks.run(FsdpOrder(case)), case) == []


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
