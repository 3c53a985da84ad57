"""A disaggregated pipeline of real processes computes what one process does, whatever the schedule, plan and topology."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.verify.cases import MOST_PROCESSES, Case, every_pipeline
from tests.verify.comparison import differences
from tests.verify.covering import covering_cases
from tests.verify.processes import TIMEOUT_S, TRANSPORTS, Processes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(TIMEOUT_S)]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(MOST_PROCESSES) as running:
        yield running


COVERING = covering_cases(strength=2)
KINDS_OF_EVERY_RUN = ("schedule", "precision", "activations", "head", "weights", "dropout", "sharing")


def in_every_run(cases: list[Case]) -> Iterator[bool]:
    """Whether a case has a choice of one of these kinds that none before has; the slow tests have the others."""
    seen: set[tuple[str, Any]] = set()
    for case in cases:
        choices = {(kind, getattr(case, kind)) for kind in KINDS_OF_EVERY_RUN}
        yield not choices <= seen
        seen |= choices


CASES = [
    pytest.param(case, transport, marks=() if is_first else pytest.mark.slow, id=f"{case}, {transport}")
    for case, transport, is_first in zip(COVERING, itertools.cycle(TRANSPORTS), in_every_run(COVERING))
]


@pytest.mark.parametrize(("case", "transport"), CASES)
def test_loss_gradients_and_weights_are_those_of_one_process(processes: Processes, case: Case, transport: str) -> None:
    assert differences(processes, case, transports=[transport]) == []


MEDIA = ("vision", "audio", "llm")
SHARED = [
    Case("1f1b", "entrain", MEDIA, "cp 2, llm in 2", "all learn", head="untied", dropout="dropout"),
    Case("zero-bubble", "disttrain", ("vision", "llm"), "cp 3, llm in 2", "frozen encoder", "clipped", "recomputed"),
    Case("eager", "orchmllm", MEDIA, "cp 2, tp 2", "first layers", precision="bfloat16"),
]
SHARED_TOO = [
    Case("interleaved", "entrain", ("vision", "llm"), "cp 2, 2 replicas", "frozen llm", "clipped", weights="sharded"),
    Case("eager", "orchmllm", ("encoder", "llm"), "cp 4", "all learn", precision="bfloat16"),
    Case("gpipe", "entrain", ("vision", "llm"), "nested in 2, on 2 that share", "all learn"),
    Case("1f1b", "entrain", ("vision", "llm"), "cp 6", "all learn"),
]
"""`make verify PART=pipeline-cp` has many more."""


@pytest.mark.parametrize("case", [*SHARED, *(pytest.param(case, marks=pytest.mark.slow) for case in SHARED_TOO)], ids=str)
def test_ranks_that_share_sequences_compute_what_one_process_does(processes: Processes, case: Case) -> None:
    assert case.can_run
    assert differences(processes, case) == []


@pytest.mark.parametrize(
    ("units", "degrees"),
    [
        (("vision", "audio", "llm"), "llm in 2"),
        (("encoder", "llm"), "llm in 2"),
        (("vision", "llm", "generator"), "llm in 2"),
        (("vision", "llm"), "cp 2, llm in 2"),
    ],
    ids=str,
)
def test_packs_that_are_padded_to_one_length_change_nothing(processes: Processes, units: tuple[str, ...], degrees: str) -> None:
    case = Case(schedule="1f1b", strategy="entrain", units=units, degrees=degrees, frozen="all learn")
    assert differences(processes, case, pack_tokens=128) == []


def test_a_wrong_gradient_is_seen(processes: Processes) -> None:
    """The comparison can fail: the same case with the LLM frozen, beside one process in which it learns."""
    case = next(case for case in every_pipeline() if case.frozen == "frozen llm")
    found = differences(processes, case, expected="all learn")
    assert any("nobody has the gradient of decoder" in line for line in found)
