"""What is made of the clock's readings; that the times are those of the layers, the profile of a real model shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from headrace.trainer.profiling import profiled_batch
from headrace.trainer.profiling.layer_times import LayerTimer
from headrace.trainer.profiling.profiled_model import ProfiledModel
from tests.verify.batches import AUDIO, GENERATING, IMAGE, VOCAB, whole_model


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiled_batch, "PACKED_POSITIONS", 64)


def timer(now_s: Callable[[], float]) -> tuple[LayerTimer, ProfiledModel]:
    model = ProfiledModel(model=whole_model(GENERATING), shape=GENERATING, image=IMAGE, audio=AUDIO, vocab_size=VOCAB)
    return LayerTimer(model, device=torch.device("cpu"), dtype=torch.float32, now_s=now_s), model


def seconds_by_turn(turns: list[float]) -> Callable[[], float]:
    """A clock by which one computation after the other, forward or backward, takes these seconds, over and over."""
    readings = itertools.accumulate(itertools.chain.from_iterable((0.0, turn) for turn in itertools.cycle(turns)))
    return lambda: next(readings)


def test_the_parts_of_a_backward_are_what_frozen_weights_and_checkpointing_change() -> None:
    layer_turns = [1.0, 2.5, 1.5, 3.0, 1.0, 1.5]  # forward and backward: plain, with checkpointing, with frozen weights
    turns_of_ends = 3 + 4  # nothing is in front of an embedding, so with frozen weights it has no backward
    clock, _ = timer(seconds_by_turn(layer_turns * 2 + [9.0] * (2 * turns_of_ends)))
    kinds = list(clock.rounds("llm", [16, 64], (1,), 3))[-1]
    layer = next(kind for kind in kinds if kind.name == "layer")
    assert layer.positions == (16.5, 64.0)
    for index, segments in ((0, 4), (1, 1)):
        assert layer.forward_s[index] == pytest.approx(1.0 / segments)
        assert layer.input_gradients_s[index] == pytest.approx(1.5 / segments)
        assert layer.weight_gradients_s[index] == pytest.approx(1.0 / segments)
        assert layer.rerun_s[index] == pytest.approx(1.0 / segments)


def test_the_first_round_only_warms_up_and_every_later_one_gives_medians() -> None:
    clock, _ = timer(seconds_by_turn([1.0]))
    rounds = list(clock.rounds("vision", [16, 32, 64], (1, 2), 2))
    assert [len(kinds) for kinds in rounds] == [0, 4, 4], "a layer at two widths, and both ends"
    assert [(kind.name, kind.tp) for kind in rounds[-1]] == [("layer", 1), ("layer", 2), ("embedding", 1), ("projector", 1)]
    embedding = rounds[-1][2]
    assert embedding.input_gradients_s == embedding.rerun_s == (0.0,) * 3, "nothing is in front of it"


def test_weights_are_freed_whatever_happens() -> None:
    clock, profiled = timer(seconds_by_turn([1.0]))
    rounds = clock.rounds("generator", [16, 32, 64], (1,), 2)
    next(rounds)
    assert not all(parameter.is_meta for parameter in profiled.model.parameters())
    rounds.close()
    assert all(parameter.is_meta for parameter in profiled.model.parameters())


def test_a_whole_model_is_timed_forward_and_backward_together() -> None:
    clock, profiled = timer(seconds_by_turn([1.0, 3.0]))
    assert clock.whole(profiled_batch.mixed_probes(IMAGE, AUDIO), repeats=1) == pytest.approx(4.0)
    assert all(parameter.is_meta for parameter in profiled.model.parameters())
