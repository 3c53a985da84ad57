"""Whole stages are timed as they run, and leave the model as it was."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from headrace.trainer.profiling import profiled_batch, stage_times
from headrace.trainer.profiling.profiled_model import ProfiledModel
from headrace.trainer.profiling.stage_times import StageTimer, StageTimes
from tests.verify.batches import AUDIO, GENERATING, IMAGE, VOCAB, whole_model

PARTS = ("vision", "audio", "llm", "generator")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiled_batch, "PACKED_POSITIONS", 64)


def measured(part: str, rounds: int = 2) -> tuple[StageTimes, ProfiledModel]:
    """A stage on a clock by which every computation takes a second."""
    model = ProfiledModel(model=whole_model(GENERATING), shape=GENERATING, image=IMAGE, audio=AUDIO, vocab_size=VOCAB)
    clock = itertools.count()
    timer = StageTimer(model, part, device=CPU, dtype=torch.float32, now_s=lambda: float(next(clock)))
    first, *others = timer.rounds([16, 32, 64], rounds)
    assert first is None
    assert others[-1] is not None
    return others[-1], model


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_run_forward_and_backward_and_updated(part: str) -> None:
    times, profiled = measured(part)
    assert times.layers == tuple(range(profiled.shape.units[part].layers))
    assert {len(shape.grids) for shape in times.shapes} == {1, 2, 4}
    assert {one.value for one in (*times.forward_s, *times.backward_s)} == {1.0}
    assert (times.gradients_s.value, times.update_s.value, times.uncertainty) == (1.0, 1.0, 0.0)
    assert all(parameter.is_meta for parameter in profiled.model.parameters())


def test_a_large_part_has_its_first_layers_and_the_last_one_and_its_update_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_times, "MOST_LAYERS", 3)
    times, profiled = measured("llm")
    assert times.layers == (0, 1, 5)
    sizes = {name: parameter.numel() for name, parameter in profiled.model.decoder.named_parameters()}
    left_out = sum(size for name, size in sizes.items() if name.split(".")[1] in ("2", "3", "4"))
    projector = sum(parameter.numel() for parameter in profiled.model.generator_projector.parameters())
    whole = sum(sizes.values()) + projector
    assert times.update_s.value == pytest.approx(whole / (whole - left_out))


def test_few_tokens_of_a_stage_carry_loss() -> None:
    [shape] = profiled_batch.stage_shapes("llm", [64], IMAGE)
    batch = profiled_batch.profiled_batch(shape, image=IMAGE, audio=AUDIO, token_ids=(3, VOCAB))
    assert shape.targets == (8,)
    assert batch.num_targets == int((batch.labels >= 0).sum()) == 8


def test_a_single_reading_is_not_certain() -> None:
    times, _ = measured("vision", rounds=1)
    assert math.isinf(times.uncertainty)
