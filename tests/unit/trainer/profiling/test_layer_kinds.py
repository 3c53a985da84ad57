"""Which layers of a model are timed: one of each kind, and all of it is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from headrace.errors import UserError
from headrace.model_shape import ModelShape, TransformerShape
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.profiling.layer_kinds import kinds_of
from headrace.trainer.profiling.profiled_batch import batch_shape, profiled_batch
from headrace.trainer.profiling.profiled_model import ProfiledModel, profiled_model
from tests.unit.trainer.models.huggingface_world import skeleton
from tests.verify.batches import AUDIO, GENERATING, IMAGE, VOCAB, whole_model

PARTS = ("vision", "audio", "llm", "generator")
CPU = torch.device("cpu")


def names(module: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def test_the_kinds_of_a_model_have_every_weight_once_for_each_layer() -> None:
    model = whole_model(GENERATING)
    named = names(model)
    covered: set[str] = set()
    for part in PARTS:
        for kind in kinds_of(model, part):
            own = {named[id(parameter)] for module in kind.modules for parameter in module.parameters()}
            if kind.layers:
                head = sorted(own)[0].partition(f".{kind.layers[0]}.")[0]
                assert kind.layers[0] == 0
                own = {name.replace(f"{head}.0.", f"{head}.{index}.") for name in own for index in kind.layers}
            covered |= own
    assert covered == set(named.values())


@pytest.mark.parametrize("part", PARTS)
def test_every_kind_computes_forward_and_backward_on_its_microbatch(part: str) -> None:
    model = whole_model(GENERATING)
    batch = profiled_batch(batch_shape(part, 16, IMAGE), image=IMAGE, audio=AUDIO, token_ids=(3, VOCAB))
    for kind in kinds_of(model, part, (1, 2)):
        kind.materialise(CPU)
        work = kind.work(batch)
        y = work.run()
        torch.autograd.backward(y, torch.ones_like(y))
        assert all(parameter.grad is not None for module in kind.modules for parameter in module.parameters()), kind.name
        assert (work.x is None) == (kind.name == "embedding" and part != "generator")
        assert work.x is None or work.x.grad is not None
        kind.release()
        assert all(parameter.is_meta for module in kind.modules for parameter in module.parameters())


def test_a_slice_has_its_share_of_the_matrices_and_leaves_the_model_whole() -> None:
    model = whole_model()
    whole, half, *_ = kinds_of(model, "llm", (1, 2))
    sizes = [{name: tuple(p.shape) for name, p in kind.modules[0].named_parameters()} for kind in (whole, half)]
    assert sizes[0]["attention.qkv.weight"] == (64, 32), "32 of queries, 16 of keys and 16 of values"
    assert sizes[1]["attention.qkv.weight"] == (32, 32)
    assert sizes[1]["attention.out.weight"] == (32, 16)
    assert sizes[1]["mlp.gate_up.weight"] == (48, 32)
    assert sizes[1]["mlp_norm.weight"] == sizes[0]["mlp_norm.weight"]
    assert dict(model.decoder.layers[0].named_parameters())["mlp.gate_up.weight"].shape == (96, 32)


def test_a_width_that_does_not_divide_the_heads_is_refused() -> None:
    encoder = TransformerShape(layers=1, width=16, heads=2, kv_heads=2, mlp=32, gated=False)
    model = ProfiledModel(
        model=whole_model(), shape=ModelShape(vision=encoder, audio=encoder, llm=encoder), image=IMAGE, audio=AUDIO, vocab_size=9
    )
    with pytest.raises(UserError, match="tp 3 of unit 'llm' does not divide its heads 2: set its tp to a divisor of 2"):
        model.check_widths(["llm"], [1, 3])


def test_layers_of_transformers_are_timed_by_kind_first_and_last_and_with_windows(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    configs = transformers.models.qwen2_5_vl.configuration_qwen2_5_vl
    config = configs.Qwen2_5_VLVisionConfig(
        depth=5, hidden_size=16, intermediate_size=32, num_heads=2, patch_size=2, spatial_merge_size=2, out_hidden_size=32,
        fullatt_block_indexes=[2], window_size=8,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = skeleton(HuggingFaceUnits(vision=tmp_path))
    kinds = kinds_of(model, "vision")
    assert [kind.layers for kind in kinds if kind.layers] == [(0,), (1, 3), (2,), (4,)], "first, windows, whole image, last"
    batch = profiled_batch(batch_shape("vision", 64, IMAGE), image=IMAGE, audio=AUDIO, token_ids=(3, VOCAB))
    for kind in kinds:
        kind.materialise(CPU)
        assert kind.work(batch).run().isfinite().all()


def test_a_model_is_named_or_a_folder_of_transformers(tmp_path: Path) -> None:
    settings = {"image": ImageSpec(), "audio": AudioSpec()}
    assert profiled_model("tiny", HuggingFaceUnits(), **settings).vocab_size == 32_000
    assert profiled_model("tiny-generator", HuggingFaceUnits(), **settings).parts == PARTS
    with pytest.raises(UserError, match="no model '9000b'; there are tiny"):
        profiled_model("9000b", HuggingFaceUnits(), **settings)
    transformers = pytest.importorskip("transformers")
    transformers.Qwen2Config(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    ).save_pretrained(tmp_path)
    adapted = profiled_model("tiny", HuggingFaceUnits(llm=tmp_path), **settings)
    assert (adapted.shape.llm.layers, adapted.vocab_size) == (3, 99)
    with pytest.raises(UserError, match=r"there is no config.json of a model at"):
        profiled_model("tiny", HuggingFaceUnits(llm=tmp_path / "nowhere"), **settings)
