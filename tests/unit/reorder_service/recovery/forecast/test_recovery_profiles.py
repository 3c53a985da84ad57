"""Profiles of models that are known by name."""

import pytest

from headrace.model_shape import MODEL_SHAPES
from headrace.reorder_service.recovery.forecast.profiles import profile_of
from headrace.reorder_service.recovery.pipeline_templates import ModelProfile
from headrace.spec import AudioSpec, ImageSpec


def named(model: str, *, microbatch: int = 1, gpus: int = 4) -> ModelProfile:
    return profile_of(
        MODEL_SHAPES[model],
        tokens=1000,
        patches=256,
        image=ImageSpec(),
        audio=AudioSpec(),
        microbatch=microbatch,
        gpus=gpus,
        memory_bytes=60 * 10**9,
    )


def test_a_profile_has_the_layers_and_weights_of_the_model_without_its_audio_encoder() -> None:
    profile = named("8b")
    assert profile.units == {"vision": 32, "llm": 32}
    assert profile.gpu_bytes[:, 0].sum() / 16 == pytest.approx(8.03e9 + 0.65e9, rel=0.01)  # Llama 3 8B, ViT-H and a projector
    assert (profile.gpu_bytes[:, 3] * 4 <= profile.gpu_bytes[:, 0]).all()
    assert named("9b").units == {"vision": 32, "llm": 32, "generator": 28}


def test_a_microbatch_takes_six_operations_a_weight_and_token_and_sharing_gpus_gain_less_and_less() -> None:
    llm = named("8b").seconds[32:]
    assert llm[:, 0].sum() == pytest.approx(6 * 7.5e9 * 1000 / 1e14, rel=0.03)  # all weights but the token embeddings
    assert named("8b", microbatch=3).seconds[32:].sum() == pytest.approx(3 * llm.sum())
    speedup = llm[0, 0] / llm[0]
    assert (speedup[1:] > speedup[:-1]).all()
    assert speedup[3] == pytest.approx(1 / (1 / 4 + 3 / 40))
