"""Whole published models: loaded, run, trained, cut into stages and exported, beside the same models of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch.distributed import checkpoint as dcp
from torch.nn import functional

from headrace.cli.main import main
from headrace.errors import UserError
from headrace.manifest import Vocabulary
from headrace.sample import LABEL_IGNORED
from headrace.spec import parse
from headrace.trainer import models
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.huggingface import model as adapted
from headrace.trainer.models.multimodal import MultimodalModel
from headrace.trainer.models.whole_model import WholeModel
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.checkpoint_files import WEIGHT, TensorKey, write
from headrace.trainer.pipeline.kept_activations import measure_kept
from headrace.trainer.pipeline.layer_partition import bounds
from headrace.trainer.pipeline.stage import Stage
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.tensor_parallel import cut_dimension
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.train_step import TrainStep, make_optimizer
from tests.unit.trainer.models.huggingface_world import assert_close, assert_gradients_match
from tests.unit.trainer.models.published_models import ARCHITECTURES, Family, family, load, our_logits, their_logits
from tests.unit.trainer.models.test_huggingface_stages import run
from tests.verify.batches import SHAPE

FAMILIES = sorted(ARCHITECTURES)
SOME = [pytest.param(name, marks=[] if name in ("qwen2_5_vl", "qwen2_audio") else [pytest.mark.slow]) for name in FAMILIES]
"""The others take the same way."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_microbatch_is_what_transformers_makes_of_each_sample(name: str, tmp_path: Path) -> None:
    of = family(name)
    original = of.original(tmp_path)
    model, batch = of.model(tmp_path), of.batch(6)

    ours, theirs = our_logits(model, batch), their_logits(original, batch)
    for logits in (ours, theirs):
        functional.cross_entropy(logits, batch.labels, ignore_index=LABEL_IGNORED, reduction="sum").backward()

    assert_close(ours, theirs)
    units = [unit for _, unit in model.named_children() if isinstance(unit, adapted.Adapted)]
    assert len(units) == 3
    for unit in units:
        assert_gradients_match(unit, original)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_answers_with_what_was_trained(name: str, tmp_path: Path) -> None:
    of, source, out = family(name), tmp_path / "published", tmp_path / "out"
    of.original(source)
    (source / "tokenizer.json").write_text(tokenizer(of.vocabulary.size))
    model = models.load(source, spec=of.spec, vocabulary=of.vocabulary)
    before = our_logits(model, of.batch(4, begin=100)).detach()
    train(model, of, steps=2)
    after = our_logits(model, of.batch(4, begin=100)).detach()
    assert (after - before).abs().max() > 1e-2

    models.export(model, source, out)

    found = their_logits(load(of, out), of.batch(4, begin=100))
    assert (found - after).abs().max() < 1e-4
    assert tensors(out).keys() == tensors(source).keys()
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("name", "fresh"), [*((name, False) for name in FAMILIES), ("qwen2_vl", True), ("qwen2_audio", True)])
def test_torch_distributed_checkpoint_loads_it_into_the_model_of_transformers(name: str, fresh: bool, tmp_path: Path) -> None:
    """All of it, tied matrices and tables too, as `dcp.load` asks for every tensor of the `state_dict`."""
    of, source, out = family(name), tmp_path / "published", tmp_path / "out"
    (of.config.save_pretrained if fresh else of.original)(source)
    (source / "tokenizer.json").write_text(tokenizer(of.vocabulary.size))
    model = models.load(source, spec=of.spec, vocabulary=of.vocabulary)
    train(model, of, steps=1)
    after = our_logits(model, of.batch(4, begin=100)).detach()

    models.export(model, source, out, format="dcp")

    found = of.original(tmp_path / "another", seed=9)
    assert (their_logits(found, of.batch(4, begin=100)) - after).abs().max() > 1e-2
    state = found.state_dict()
    dcp.load(state, checkpoint_id=out, no_dist=True)
    found.load_state_dict(state)
    assert (their_logits(found, of.batch(4, begin=100)) - after).abs().max() < 1e-4
    assert (out / "tokenizer.json").is_file()
    assert not list(out.glob("*.safetensors"))


@pytest.mark.parametrize("name", SOME)
def test_a_checkpoint_of_many_processes_is_exported(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of stages one behind the other, whose matrices lie in two slices."""
    of, source, saved, out = family(name), tmp_path / "published", tmp_path / "saved", tmp_path / "out"
    of.original(source)
    stages = chain(of, source, in_four(of))
    batch = of.batch(6)
    model = of.model(source)
    expected = model(batch)
    expected.loss_sum.backward()
    encoder = next(unit for unit in stages if unit != "llm")
    result = run(stages["llm"], batch, {encoder: run(stages[encoder], batch, {}).rows})
    assert result.loss is not None
    assert_close(result.loss.loss_sum, expected.loss_sum)
    result.loss.loss_sum.backward()
    parts = [stage for unit in stages for stage in stages[unit]]
    written: set[str] = set()
    for rank, stage in enumerate(parts):
        with torch.no_grad():
            for name_of, parameter in stage.model.named_parameters():
                if name_of != "decoder.embed.weight":  # being tied, it may be in two stages
                    parameter -= 1e-3 * parameter.grad
        write(saved, 7, rank, len(parts), {}, dict(pieces(stage, written)))
    with torch.no_grad():
        for name_of, parameter in model.named_parameters():
            if name_of != "decoder.embed.weight":
                parameter -= 1e-3 * parameter.grad

    assert main(["export", str(saved), str(out), "--model", str(source)]) == 0

    assert f"step 7 written to {out}" in capsys.readouterr().out
    found = their_logits(load(of, out), batch)
    assert (found - our_logits(model, batch)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_audio"])
def test_the_only_encoder_of_a_model_may_be_the_joint_one(name: str, tmp_path: Path) -> None:
    of, units = family(name), HuggingFaceUnits(whole=tmp_path)
    of.config.save_pretrained(tmp_path)
    topology = parse(PipelineTopology, {"units": {"encoder": {}, "llm": {}}}, "topology")
    stages = chain(of, tmp_path, topology)
    settings = {"dtype": torch.float32, "image": of.spec.image, "audio": of.spec.audio}
    assert measure_kept(stages["encoder"][0], topology, Place("encoder", 0, 0, 0), 0, **settings).of_row(()) > 0
    batch = of.batch(4)
    result = run(stages["llm"], batch, {"encoder": run(stages["encoder"], batch, {}).rows})
    assert result.loss is not None
    assert_close(result.loss.loss_sum, of.model(tmp_path)(batch).loss_sum)
    other = "audio" if of.grids else "vision"
    with pytest.raises(UserError, match=rf"the model has no unit '{other}', only encoder, "):
        parse(PipelineTopology, {"units": {other: {}, "llm": {}}}, "topology").check(2, adapted.adapted_shape(units, SHAPE))


def test_a_model_that_began_fresh_is_exported_in_files_of_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.trainer.models.huggingface.safetensors_export.MAX_FILE_BYTES", 40_000)
    for name in ("qwen2_vl", "qwen2_audio"):
        of, source, out = family(name), tmp_path / name, tmp_path / f"{name} out"
        of.config.save_pretrained(source)
        model = models.load(source, spec=of.spec, vocabulary=of.vocabulary, seed=3)

        models.export(model, source, out)

        assert len(list(out.glob("*.safetensors"))) > 1
        found = their_logits(load(of, out), of.batch(4))
        assert (found - our_logits(model, of.batch(4))).abs().max() < 1e-4


def test_weights_keep_their_dtype_unless_another_is_asked_for(tmp_path: Path) -> None:
    of, source = family("llava"), tmp_path / "published"
    of.original(source, dtype=torch.bfloat16)
    model = of.model(source)

    adapted_units = HuggingFaceUnits(whole=source)
    for dtype, expected in ((None, torch.bfloat16), ("float32", torch.float32)):
        models.export(model, source, tmp_path / str(dtype), dtype=dtype)
        assert {tensor.dtype for tensor in tensors(tmp_path / str(dtype)).values()} == {expected}
        assert json.loads((tmp_path / str(dtype) / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")
    assert adapted.pretrained(adapted_units) == [source]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_part_of_a_model_is_exported_with_what_was_not_trained_as_it_was(tmp_path: Path) -> None:
    of = family("llava")
    of.original(tmp_path / "llava")
    units = HuggingFaceUnits(vision=tmp_path / "llava")
    model = adapted.adapted_model(
        units,
        SHAPE,
        vocab_size=of.vocabulary.size,
        image=of.spec.image,
        audio=of.spec.audio,
        image_token_id=1,
        audio_token_id=-1,
    )
    model.to_empty(device="cpu")
    adapted.initialise(model, 0)
    with torch.no_grad():
        model.vision.embed.weight.add_(1)
    weights = {TensorKey(name=name, kind=WEIGHT): tensor.detach() for name, tensor in model.named_parameters()}
    write(tmp_path / "saved", 1, 0, 1, {}, weights)

    arguments = ["export", str(tmp_path / "saved"), "--vision", str(tmp_path / "llava")]
    assert main([*arguments, str(tmp_path / "out")]) == 0
    assert main([*arguments, str(tmp_path / "dcp"), "--format", "dcp", "--dtype", "bfloat16"]) == 0

    before, after = tensors(tmp_path / "llava"), tensors(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"vision_tower.embeddings.patch_embedding.weight"}
    tower = transformers.CLIPVisionModel(of.config.vision_config).bfloat16()
    state = tower.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    expected = {name.removeprefix("vision_tower."): tensor for name, tensor in after.items() if name.startswith("vision_tower.")}
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("qwen2_vl", {"mrope": False}, r"takes positions in time, height and width: set mrope: true in the job"),
        ("qwen2_vl", {"image": {"patch": 14}}, r"patches of 4 pixels, but the job's image.patch is 14: set it to 4"),
        ("internvl", {"image": {"patch": 4, "merge": 1}}, r"joins 2 x 2 patches, but the job's image.merge is 1: set it to 2"),
        (
            "llava_onevision",
            {"image": {"patch": 4, "merge": 1, "fit": "anyres", "side": 16, "max_tiles_per_side": 3}},
            r"takes image.anyres_max 2, but the job's is 9: set it to 2",
        ),
        ("llava_onevision", {"image": {"patch": 4, "merge": 1}}, r"takes image.fit anyres, but the job's is area: set it to"),
        (
            "llava",
            {"image": {"patch": 4, "merge": 1, "fit": "anyres", "side": 16}},
            r"fit is anyres, and the model in .* makes a token of each patch: set another fit",
        ),
        ("qwen2_audio", {"audio": {"mel_bins": 4, "max_seconds": 0.4}}, r"frames_per_token 8 and audio.last_token pad: set .* 4"),
    ],
)
def test_a_job_that_does_not_fit_the_model_is_refused(name: str, changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    of = family(name)
    of.config.save_pretrained(tmp_path)
    spec = parse(type(of.spec), {**of.spec.model_dump(), **changes}, "job spec")
    with pytest.raises(UserError, match=match):
        models.load(tmp_path, spec=spec, vocabulary=of.vocabulary)


def test_a_folder_with_another_tokenizer_than_the_jobs_is_refused(tmp_path: Path) -> None:
    of = family("llava")
    of.original(tmp_path)
    with pytest.raises(UserError, match=r"no tokenizer.json, and the job's text.tokenizer is the bundled one with 64"):
        models.load(tmp_path, spec=of.spec, vocabulary=of.vocabulary)
    (tmp_path / "tokenizer.json").write_text(tokenizer(60))
    with pytest.raises(UserError, match=r"has 60 tokens, but the job's text.tokenizer, the bundled one, has 64"):
        models.load(tmp_path, spec=of.spec, vocabulary=of.vocabulary)
    (tmp_path / "tokenizer.json").write_text(tokenizer(64))
    other = Vocabulary(size=64, image_token=5, audio_token=-1)
    with pytest.raises(UserError, match=r"token of image placeholders is 5, and that of the model in .* is 1 \(image_token_id\)"):
        models.load(tmp_path, spec=of.spec, vocabulary=other)


def test_a_medium_that_the_model_does_not_take_is_refused(tmp_path: Path) -> None:
    for name, other, match in (("llava", "qwen2_audio", "recordings, and"), ("qwen2_audio", "llava", "images, and")):
        of = family(name)
        of.config.save_pretrained(tmp_path / name)
        with pytest.raises(UserError, match=match):
            of.model(tmp_path / name)(family(other).batch(2))


def test_pretrained_weights_need_a_rate_of_their_own(tmp_path: Path) -> None:
    of = family("llava")
    of.original(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer(64))
    whole = WholeModel.of("tiny", of.spec, of.vocabulary, HuggingFaceUnits(whole=tmp_path))
    with pytest.raises(UserError, match=r"are pretrained, and the learning rate 0.003 .* would destroy them: set optimizer"):
        OptimizerSpec().resolved("tiny", whole.pretrained)
    assert OptimizerSpec(learning_rate=1e-5).resolved("tiny", whole.pretrained).decay_embeddings is False


def test_nothing_is_exported_over_something_or_from_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = family("llava")
    of.config.save_pretrained(tmp_path / "config")
    model = of.model(tmp_path / "config")
    with pytest.raises(UserError, match="is not empty: name a folder that is"):
        models.export(model, tmp_path / "config", tmp_path / "config")
    with pytest.raises(UserError, match=r"tensors are not trained, and .* has no weights to copy them from"):
        models.export(model, tmp_path / "config", tmp_path / "out")
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--model", str(tmp_path / "config")]) == 2
    assert "there is no complete checkpoint" in capsys.readouterr().err


def train(model: MultimodalModel, of: Family, steps: int) -> None:
    step = TrainStep(model, make_optimizer(model.parameters(), OptimizerSpec(learning_rate=1e-2)))
    for number in range(steps):
        step.accumulate(of.batch(4, begin=10 * number))
        assert step.finish(1e-2).loss > 0


def in_four(of: Family) -> PipelineTopology:
    """Encoder and llm, each in two stages."""
    encoder = "vision" if of.grids else "audio"
    return parse(PipelineTopology, {"units": {encoder: {"pp": 2}, "llm": {"pp": 2}}}, "topology")


def chain(of: Family, folder: Path, topology: PipelineTopology) -> dict[str, list[Stage]]:
    """All stages of every unit, in order."""
    units = HuggingFaceUnits(whole=folder)
    shape = adapted.adapted_shape(units, SHAPE)
    topology.check(topology.world_size, shape)
    cuts = bounds(topology, shape, vocab_size=of.vocabulary.size, image=of.spec.image, audio=of.spec.audio)
    options = {"seed": 0, "device": torch.device("cpu"), "slices": None, "initialise": adapted.initialise}
    return {
        unit: [
            stage
            for number in range(topology.units[unit].pp)
            for stage in build_stages(lambda: of.skeleton(folder), topology, Place(unit, 0, number, 0), cuts[unit], **options)
        ]
        for unit in topology.units
    }


def pieces(stage: Stage, written: set[str]) -> Any:
    """What two slices of a stage would write, a tied matrix once."""
    for name, parameter in stage.model.named_parameters():
        if name in written:
            continue
        written.add(name)
        dim = cut_dimension(name)
        if dim is None:
            yield TensorKey(name=name, kind=WEIGHT), parameter.detach()
        else:
            for index, part in enumerate(torch.tensor_split(parameter.detach(), 2, dim)):
                yield TensorKey(name=name, kind=WEIGHT, dim=dim, index=index, count=2), part.contiguous()


def tokenizer(size: int) -> str:
    """A tokenizer.json of so many tokens."""
    return json.dumps(
        {"model": {"vocab": {f"t{number}": number for number in range(size - 1)}}, "added_tokens": [{"id": size - 1}]}
    )


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found
