"""Stages of a pipeline with units of `transformers`, one behind the other, beside the whole model."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.spec import parse
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.huggingface import model as adapted
from headrace.trainer.pipeline.chunk import Output
from headrace.trainer.pipeline.kept_activations import measure_kept
from headrace.trainer.pipeline.layer_partition import bounds
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from tests.host_waits import watched
from tests.unit.trainer.models.huggingface_world import assert_close, skeleton, whole
from tests.verify.batches import AUDIO, IMAGE, SHAPE, VOCAB, make_row, packed

WIDTH, HEADS, MLP, RANGE = 32, 4, 48, 0.1
LLM = {"hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": 4, "num_attention_heads": HEADS}
VIT = {"hidden_size": WIDTH, "intermediate_size": MLP, "patch_size": IMAGE.patch, "initializer_range": RANGE}
VISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": (
        "Qwen2_5_VLVisionConfig",
        {**VIT, "depth": 4, "num_heads": HEADS, "window_size": 8, "fullatt_block_indexes": [1, 3], "out_hidden_size": WIDTH},
    ),
    "siglip": ("SiglipVisionConfig", {**VIT, "num_hidden_layers": 3, "num_attention_heads": HEADS, "image_size": 8}),
    "clip": ("CLIPVisionConfig", {**VIT, "num_hidden_layers": 3, "num_attention_heads": HEADS, "image_size": 8}),
}


@pytest.mark.parametrize(
    ("vision", "frozen", "schedule"),
    [("qwen", False, "1f1b"), ("qwen", True, "1f1b"), ("siglip", False, "zero-bubble"), ("clip", False, "1f1b")],
)
def test_stages_one_behind_the_other_are_the_whole_model(vision: str, frozen: bool, schedule: str, tmp_path: Path) -> None:
    units = configurations(vision, tmp_path)
    document = {"pp": 2, "frozen": frozen, "checkpointing": not frozen}
    documents = {"vision": document, "audio": document, "llm": {**document, "pp": 3}}
    topology = parse(PipelineTopology, {"schedule": schedule, "units": documents}, "topology")
    topology.check(topology.world_size, adapted.adapted_shape(units, SHAPE))
    batch = packed([make_row(number, audio=True) for number in range(6)])
    model = whole(units)
    expected = model(batch)
    expected.loss_sum.backward()

    stages = {unit: chain(unit, topology, units) for unit in topology.units}
    arrived = {unit: run(stages[unit], batch, {}).rows for unit in ("vision", "audio")}
    result = run(stages["llm"], batch, arrived)
    assert result.loss is not None
    result.loss.loss_sum.backward()
    if schedule == "zero-bubble":
        for stage in itertools.chain.from_iterable(stages.values()):
            stage.take_weight_gradients()()

    assert_close(result.loss.loss_sum, expected.loss_sum)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    seen = set()
    for unit in stages:
        for stage in stages[unit]:
            for name, parameter in stage.model.named_parameters():
                if parameter.grad is not None and name != "decoder.embed.weight":
                    assert_close(parameter.grad, gradients[name])
                    seen.add(name)
    learning = {name for name in gradients if not frozen or name.split(".")[0].endswith("_projector")}
    assert seen == learning - {"decoder.embed.weight"}  # which is in the first stage and, being tied, in the last


@pytest.mark.parametrize("vision", VISIONS)
def test_nothing_in_a_stage_waits_for_a_gpu(vision: str, tmp_path: Path) -> None:
    """Once it has made its tables, with all that follows from a microbatch made beside it."""
    units = configurations(vision, tmp_path)
    topology = parse(PipelineTopology, {"units": {"vision": {}, "audio": {}, "llm": {}}}, "topology")
    batch = packed([make_row(number, audio=True) for number in range(6)])
    stages = {unit: chain(unit, topology, units)[0] for unit in topology.units}
    inputs = {unit: stage.prepare(batch) for unit, stage in stages.items()}
    for _ in range(2):
        found: Counter[str] = Counter()
        with watched(found, allowed=HOST_TENSORS):
            arrived = {unit: stages[unit](inputs[unit], None, {}).rows for unit in ("vision", "audio")}
            output = stages["llm"](inputs["llm"], None, arrived)
            output.loss.loss_sum.backward()
    assert not found


HOST_TENSORS = {"models/huggingface/qwen_vision.py:WindowLayer.forward"}
"""Qwen's attention takes one cut from a tensor, which is made, and stays, on the host."""


def test_every_unit_computes_in_half_precision_too(tmp_path: Path) -> None:
    """By autocast: hidden states between layers stay float32."""
    batch = packed([make_row(number, audio=True) for number in range(6)])
    for vision in VISIONS:
        model = whole(configurations(vision, tmp_path / vision))
        with torch.autocast("cpu", torch.bfloat16):
            half = model(batch).loss_sum
        assert half.item() == pytest.approx(model(batch).loss_sum.item(), rel=0.02)
        half.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("vision", VISIONS)
def test_what_a_stage_keeps_is_measured_and_running_again_keeps_less(vision: str, tmp_path: Path) -> None:
    """Also with a residual stream in half precision, which every layer takes as it is."""
    units = configurations(vision, tmp_path)
    document = {"pp": 2, "fp32_residual_connection": False}
    topology = parse(PipelineTopology, {"units": dict.fromkeys(("vision", "audio", "llm"), document)}, "topology")
    for unit, stage in ((unit, stage) for unit in topology.units for stage in range(2)):
        found = chain(unit, topology, units)[stage]
        place, settings = Place(unit, 0, stage, 0), {"dtype": torch.bfloat16, "image": IMAGE, "audio": AUDIO}
        kept = measure_kept(found, topology, place, 0, **settings)
        assert len(kept.savings) == len(found.layers)
        assert kept.of_row(range(len(found.layers))) < kept.of_row(())


def test_a_stage_has_its_own_tensors_only_and_reads_them_from_the_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLM, vocab_size=VOCAB, num_key_value_heads=2)
    original = transformers.LlamaForCausalLM(config)
    original.save_pretrained(tmp_path)
    topology = parse(PipelineTopology, {"units": {"vision": {}, "llm": {"pp": 2}}}, "topology")
    first, last = chain("llm", topology, HuggingFaceUnits(llm=tmp_path))
    saved = dict(original.named_parameters())
    for stage in (first, last):
        for name, parameter in stage.model.decoder.named_parameters():
            assert torch.equal(parameter, saved[stage.model.decoder.stored_names[name]])
    names = [{name for name, _ in stage.model.named_parameters()} for stage in (first, last)]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == len(saved)


def configurations(vision: str, folder: Path) -> HuggingFaceUnits:
    """Of models that start from the seed."""
    kind, options = VISIONS[vision]
    whisper = {"d_model": WIDTH, "encoder_attention_heads": HEADS, "encoder_layers": 2, "encoder_ffn_dim": MLP}
    configs = {
        "vision": getattr(transformers, kind)(**options),
        "audio": transformers.WhisperConfig(**whisper, num_mel_bins=AUDIO.mel_bins, init_std=RANGE),
        "llm": transformers.Qwen2Config(
            **LLM, num_key_value_heads=2, vocab_size=VOCAB, tie_word_embeddings=True, initializer_range=RANGE
        ),
    }
    for unit, config in configs.items():
        config.save_pretrained(folder / unit)
    return HuggingFaceUnits(**{unit: folder / unit for unit in configs})


def chain(unit: str, topology: PipelineTopology, units: HuggingFaceUnits) -> list[Stage]:
    """All stages of a unit, in order."""
    shape = adapted.adapted_shape(units, SHAPE)
    cuts = bounds(topology, shape, vocab_size=VOCAB, image=IMAGE, audio=AUDIO)[unit]
    stages = []
    for stage in range(topology.units[unit].pp):
        stages += build_stages(
            lambda: skeleton(units),
            topology,
            Place(unit, 0, stage, 0),
            cuts,
            seed=0,
            device=torch.device("cpu"),
            slices=None,
            initialise=adapted.initialise,
        )
    return stages


def run(stages: list[Stage], batch: PackedMicrobatch, arrived: dict[str, Any]) -> Output:
    """What the last stage makes; the hidden states between stages have the size that the stages say."""
    output = Output()
    for stage in stages:
        x = output.rows
        inputs = stage.prepare(batch)
        assert x is None or x.shape == (inputs.num_rows, stage.width)
        output = stage(inputs, x, arrived if x is None else {})
    return output
