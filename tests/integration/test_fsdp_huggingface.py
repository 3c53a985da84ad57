"""Published models of `transformers` on FSDP ranks, and where ranks of a pipeline share sequences, beside one that has all of
it, and back to a folder."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.example import example_data
from headrace.cli.main import main
from headrace.preprocessor.text import BUNDLED
from headrace.preprocessor.text.template import load_template
from headrace.text_spec import TextSpec
from tests.integration.test_fsdp_training import FSDP, trained
from tests.integration.trainers import losses

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 60_000,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56}


def qwen2_vl(image_token: int, _: int) -> Any:
    """Its positions are in time, height and width, and embedding and head one matrix."""
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**TEXT, "rope_parameters": rope}
    config = transformers.Qwen2VLConfig(
        vision_config=vision, text_config=text, image_token_id=image_token, tie_word_embeddings=True
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def llava_onevision(image_token: int, _: int) -> Any:
    """It joins tiles of an image to as many tokens as the image's size asks for."""
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**TOWER, patch_size=14, vision_use_head=False),
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_index=image_token,
        image_grid_pinpoints=[[56 * rows, 56 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)],
        vision_aspect_ratio="anyres_max_2",
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def qwen2_audio(_: int, audio_token: int) -> Any:
    """It takes recordings, of 30 s at most."""
    encoder = {"num_mel_bins": 128, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    config = transformers.Qwen2AudioConfig(
        audio_config=encoder, text_config=transformers.Qwen2Config(**TEXT), audio_token_index=audio_token
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


PICTURES = {"sources": [{"path": str(example_data() / "pictures-00000.tar")}]}
TILES = {"fit": "anyres", "side": 56, "patch": 14, "merge": 1, "max_tiles_per_side": 3, "anyres_max": 2}
SOUND = {"frames_per_token": 4, "last_frame": "pad", "last_token": "drop", "max_seconds": 30}


@pytest.mark.parametrize(
    ("make", "unit", "sections"),
    [
        (qwen2_vl, "vision", {**PICTURES, "mrope": True}),
        (llava_onevision, "vision", {**PICTURES, "image": TILES}),
        (qwen2_audio, "audio", {"sources": [{"path": str(example_data() / "sound-00000.tar")}], "audio": SOUND}),
    ],
)
def test_two_ranks_train_a_published_model_as_one_does(
    calm, spec, tmp_path: Path, make: Any, unit: str, sections: dict[str, Any]
) -> None:
    """They share sequences, where the plan says so, and what they have learnt is a folder that transformers loads."""
    vocabulary = load_template(TextSpec()).vocabulary
    folder, saved = tmp_path / "model", tmp_path / "saved"
    make(vocabulary.image_token, vocabulary.audio_token).save_pretrained(folder)
    shutil.copy(BUNDLED, folder / "tokenizer.json")
    settings = tmp_path / "model.yaml"
    settings.write_text(yaml.safe_dump({"model": {"whole": str(folder)}, "optimizer": {"learning_rate": 1e-3}}))
    of_model = ["--topology", str(settings)]
    options = ["--fsdp", *of_model]
    job_of = partial(spec, steps=2, global_batch=3, **sections)
    stages = {unit: 1, "llm": 1}
    alone = calm.submit(
        job_of(f"{make.__name__}-alone", topology={"replicas": 1, "microbatches": 1, "stages": stages}, execution=FSDP)
    )
    [log] = trained(calm, tmp_path, alone, 1, *options)
    expected = losses(log)
    assert len(expected) == 2
    shared = {**FSDP, "units": {"llm": {"cp": "auto"}}}
    job = calm.submit(
        job_of(f"{make.__name__}-shared", topology={"replicas": 2, "microbatches": 1, "stages": stages}, execution=shared)
    )
    for log in trained(calm, tmp_path, job, 2, *options, "--checkpoint", str(saved)):
        assert losses(log) == pytest.approx(expected, rel=1e-4)
    with calm.client() as client:
        degrees = [client.show_plan(job, step)[1].degrees for step in range(2)]
    assert any(degrees) or unit == "audio", "some sequence is shared, but those of sounds are of one block"
    topology = {"replicas": 1, "microbatches": 1, "stages": stages | {"llm": 2}}
    staged = {"trainer": "pipeline", "units": {"llm": {"cp": 2}}}
    job = calm.submit(job_of(f"{make.__name__}-staged", topology=topology, execution=staged))
    for log in trained(calm, tmp_path, job, 5, *of_model):
        assert losses(log) == pytest.approx(expected, rel=1e-4)
    out = tmp_path / "out"
    assert main(["export", str(saved), str(out), "--model", str(folder)]) == 0
    _, info = type(make(vocabulary.image_token, vocabulary.audio_token)).from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
