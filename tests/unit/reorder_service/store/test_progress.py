"""The sums of a job, and when a source's bad samples stop it."""

from __future__ import annotations

import math

import pytest

from headrace.reorder_service.store.progress import Amounts, Progress, StepRecord, added, beyond_limit
from headrace.source_spec import SourceSpec


def test_sums_grow_step_by_step() -> None:
    steps = [StepRecord(samples=("a", "b"), loss=loss, step_s=2.0, data_wait_s=0.5) for loss in (math.nan, 3.0, math.nan, 1.0)]
    progress = Progress()
    for record in steps:
        progress = progress.after(record)
    assert (progress.samples, progress.first_loss, progress.last_loss) == (8, 3.0, 1.0)
    assert (progress.step_s, progress.data_wait_s) == (8.0, 2.0)


def test_amounts_add_up_source_by_source() -> None:
    one = {"a": Amounts(1, 10, 4, 0), "b": Amounts(refused=1)}
    assert added(one, {"b": Amounts(2, 5, 0, 7)}) == {"a": Amounts(1, 10, 4, 0), "b": Amounts(2, 5, 0, 7, 1)}


@pytest.mark.parametrize(
    ("limits", "samples", "refused", "words"),
    [
        ({}, 0, 500, ""),
        ({"max_bad": 2}, 10, 2, ""),
        ({"max_bad": 2}, 10, 3, "3 samples of source 'web' were refused, more than its max_bad of 2"),
        ({"max_bad": 0}, 10, 1, "max_bad of 0"),
        ({"max_bad_share": 0.1}, 90, 9, ""),  # too few to judge
        ({"max_bad_share": 0.1}, 90, 10, ""),
        ({"max_bad_share": 0.1}, 89, 11, "11 of 100 samples of source 'web' were refused, more than its max_bad_share of 0.1"),
    ],
)
def test_bad_samples_stop_a_job_where_its_source_says_so(
    limits: dict[str, float], samples: int, refused: int, words: str
) -> None:
    source = SourceSpec.model_validate({"path": "/web", **limits})
    sentence = beyond_limit(source, Amounts(samples=samples, refused=refused))
    assert words in sentence
    assert bool(words) == bool(sentence)
    assert "headrace job quarantine" in sentence or not sentence
