"""`headrace train --topology` with an llm of Hugging Face's transformers, and without transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.example import example_data
from headrace.cli.main import main
from headrace.preprocessor.text import BUNDLED
from headrace.preprocessor.text.template import load_template
from headrace.processes import Process, ProcessGroup, torchrun_environments
from headrace.text_spec import TextSpec
from tests.integration.test_pipeline_training import losses, wait
from tests.wire import free_ports

pytestmark = pytest.mark.integration

UNITS = {"encoder": {}, "llm": {}}
PLANNED = {"replicas": 1, "microbatches": 2, "stages": {"encoder": 1, "llm": 1}}
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 60_000,
}


def adapted(folder: Path) -> dict[str, Any]:
    """An encoder, which is compact, and an llm from a config.json."""
    (folder / "config.json").write_text(json.dumps(QWEN))
    return {"units": UNITS, "model": {"llm": str(folder)}}


def start(
    group: ProcessGroup,
    cluster: Any,
    job: str,
    folder: Path,
    topology: dict[str, Any],
    *options: str,
    world: int = 2,
    **environment: str,
) -> list[Process]:
    """The processes of a topology."""
    (folder / "topology.yaml").write_text(yaml.safe_dump(topology))
    arguments = ["train", "--endpoint", cluster.endpoint, "--job", job, "--threads", "1", "--format", "json"]
    arguments += ["--topology", str(folder / "topology.yaml"), *options]
    return [
        group.add(Process(f"trainer {rank}", arguments, folder / f"{rank}.log", of_rank | environment))
        for rank, of_rank in enumerate(torchrun_environments(world, free_ports(1)[0]))
    ]


@pytest.mark.slow
def test_a_job_trains_an_llm_of_transformers(calm, spec, tmp_path: Path) -> None:
    job = calm.submit(spec("adapted", steps=2, topology=PLANNED))
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, adapted(tmp_path))
        assert wait(processes) == [0, 0], processes[0].last_words()
        encoder, llm = (losses(process.log) for process in processes)
    assert encoder == llm
    assert len(llm) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_whole_published_model_is_trained_and_transformers_loads_it(calm, spec, tmp_path: Path) -> None:
    """Cut into an encoder and two stages of the llm, whose embedding and head are one matrix."""
    transformers = pytest.importorskip("transformers")
    stages = {"vision": 1, "llm": 2}
    pictures = {"sources": [{"path": str(example_data() / "pictures-00000.tar")}], "mrope": True}
    job = calm.submit(spec("whole", steps=2, topology=PLANNED | {"stages": stages}, **pictures))
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
    text = {name: value for name, value in QWEN.items() if name not in ("model_type", "head_dim")}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = transformers.Qwen2VLConfig(
        vision_config=vision,
        text_config={**text, "rope_parameters": rope},
        image_token_id=load_template(TextSpec()).vocabulary.image_token,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path / "model")
    topology = {"units": {"vision": {}, "llm": {"pp": 2}}, "model": {"whole": str(tmp_path / "model")}}
    with ProcessGroup() as group:
        options = ("--checkpoint", str(tmp_path / "saved"))
        processes = start(group, calm, job, tmp_path, topology, *options, world=3)
        assert wait(processes) == [0, 0, 0], processes[0].last_words()
        assert len(losses(processes[0].log)) == 2
    out = tmp_path / "out"

    assert main(["export", str(tmp_path / "saved"), str(out), "--model", str(tmp_path / "model")]) == 0

    _, info = transformers.Qwen2VLForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_llava_onevision_is_trained_with_the_tiles_of_its_images(calm, spec, tmp_path: Path) -> None:
    """Cut into two stages of its tower, of which the last one takes the padding out, and its llm."""
    transformers = pytest.importorskip("transformers")
    folder, vocabulary = tmp_path / "model", load_template(TextSpec()).vocabulary
    image = {"fit": "anyres", "side": 56, "patch": 14, "merge": 1, "max_tiles_per_side": 3, "anyres_max": 2}
    pictures = {"sources": [{"path": str(example_data() / "pictures-00000.tar")}], "image": image}
    job = calm.submit(spec("tiles", steps=2, topology=PLANNED | {"stages": {"vision": 2, "llm": 1}}, **pictures))
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56}
    text = {name: value for name, value in QWEN.items() if name not in ("model_type", "head_dim")}
    config = transformers.LlavaOnevisionConfig(
        vision_config=transformers.SiglipVisionConfig(**tower, patch_size=14, vision_use_head=False),
        text_config=transformers.Qwen2Config(**text),
        image_token_index=vocabulary.image_token,
        image_grid_pinpoints=[[56 * rows, 56 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)],
        vision_aspect_ratio="anyres_max_2",
    )
    transformers.LlavaOnevisionForConditionalGeneration(config).save_pretrained(folder)
    shutil.copy(BUNDLED, folder / "tokenizer.json")
    topology = {"units": {"vision": {"pp": 2}, "llm": {}}, "model": {"whole": str(folder)}, "optimizer": {"learning_rate": 1e-3}}
    with ProcessGroup() as group:
        options = ("--checkpoint", str(tmp_path / "saved"))
        processes = start(group, calm, job, tmp_path, topology, *options, world=3)
        assert wait(processes) == [0, 0, 0], processes[0].last_words()
        assert len(losses(processes[0].log)) == 2
    out = tmp_path / "out"

    assert main(["export", str(tmp_path / "saved"), str(out), "--model", str(folder)]) == 0

    model, info = transformers.LlavaOnevisionForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    before = transformers.LlavaOnevisionForConditionalGeneration.from_pretrained(folder)
    assert not model.model.image_newline.equal(before.model.image_newline)


@pytest.mark.slow
def test_a_job_with_recordings_longer_than_the_encoders_positions_is_refused_before_its_first_step(
    calm, spec, tmp_path: Path
) -> None:
    """The default is ten minutes, and Whisper has positions for 30 s."""
    job = calm.submit(spec("too-long", steps=1, topology=PLANNED | {"stages": {"audio": 1, "llm": 1}}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper", "num_mel_bins": 128}))
    document = {"units": {"audio": {}, "llm": {}}, "model": {"audio": str(tmp_path)}}
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, document)
        assert wait(processes) == [2, 2]
        assert "audio.max_seconds (600) allows more than the 1500 positions" in processes[0].last_words()


@pytest.mark.slow
def test_without_transformers_it_is_asked_for(calm, spec, tmp_path: Path) -> None:
    job = calm.submit(spec("bare", steps=1, topology=PLANNED))
    absent = tmp_path / "absent" / "transformers.py"
    absent.parent.mkdir()
    absent.write_text("raise ModuleNotFoundError(\"No module named 'transformers'\")")
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, adapted(tmp_path), PYTHONPATH=str(absent.parent))
        assert wait(processes) == [2, 2]
        assert "the topology's model needs transformers" in processes[0].last_words()


@pytest.mark.slow
def test_pretrained_weights_are_not_trained_at_the_rate_of_fresh_ones(calm, spec, tmp_path: Path) -> None:
    job = calm.submit(spec("pretrained", steps=1, topology=PLANNED))
    (tmp_path / "model.safetensors").touch()
    with ProcessGroup() as group:
        processes = start(group, calm, job, tmp_path, adapted(tmp_path))
        assert wait(processes) == [2, 2]
        words = processes[0].last_words()
    assert f"the weights in {tmp_path} are pretrained" in words
    assert "set optimizer.learning_rate in the topology" in words
