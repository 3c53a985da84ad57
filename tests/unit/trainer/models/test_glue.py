"""Encoders, projectors and language models of the user's, joined in Python: beside the same forward by hand, trained, and cut."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headrace.errors import UserError
from headrace.manifest import Vocabulary
from headrace.spec import parse, parse_spec
from headrace.trainer.models.glue import EncoderModule, GluedModel, in_units, input_features, pixel_values
from headrace.trainer.models.multimodal import initialise
from headrace.trainer.optimizer_spec import OptimizerSpec
from headrace.trainer.pipeline.kept_activations import measure_kept
from headrace.trainer.pipeline.layer_partition import bounds
from headrace.trainer.pipeline.stage_building import build_stages
from headrace.trainer.pipeline.topology import PipelineTopology, Place
from headrace.trainer.train_step import TrainStep, make_optimizer
from tests.host_waits import watched
from tests.unit.trainer.models.glue_world import (
    LLM,
    MERGE,
    SPEC,
    VISION,
    VOCABULARY,
    ByHand,
    batch,
    encoders,
    glued,
    language_model,
    tower,
    whisper,
)
from tests.unit.trainer.models.huggingface_world import assert_close
from tests.unit.trainer.models.test_huggingface_stages import run
from tests.verify.batches import make_row, packed, whole_model

JOB: dict[str, Any] = {"spec": SPEC, "vocabulary": VOCABULARY}
KINDS = ["linear", "mlp", "cross_attention"]


@pytest.mark.parametrize(
    ("kind", "family"), [*((kind, "Llama") for kind in KINDS), *(("mlp", family) for family in ("Qwen3", "GPT2", "Gemma3"))]
)
def test_a_packed_microbatch_is_what_the_modules_make_of_each_sample_by_hand(kind: str, family: str) -> None:
    llm = language_model(family)
    untouched = copy.deepcopy(llm)
    model = glued(kind, llm)
    by_hand = ByHand(model, untouched)
    data = batch(range(6))

    loss = model(data)
    expected = by_hand(data)
    loss.loss_sum.backward()
    expected.backward()

    assert loss.target_weight == 6 * 5
    assert_close(loss.loss_sum, expected)
    for ours, theirs in (
        (model.vision.layers[0].module, by_hand.towers["vision"]),
        (model.audio.layers[0].module, by_hand.towers["audio"]),
        (model.vision_projector.projection, by_hand.projectors["vision"]),
        (model.audio_projector.projection, by_hand.projectors["audio"]),
        (llm, untouched),
    ):
        gradients = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            if gradients[name].grad is not None:
                assert_close(parameter.grad, gradients[name].grad)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_all_learns_but_what_is_frozen(kind: str) -> None:
    model = glued(kind)
    model.vision.layers.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step = TrainStep(model, make_optimizer(learning, OptimizerSpec(learning_rate=1e-2)))
    losses = []
    for _ in range(8):
        for numbers in (range(4), range(4, 6)):
            step.accumulate(batch(numbers))
        losses.append(step.finish(1e-2).loss)

    assert losses[-1] < losses[0] / 2
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if not name.startswith("vision.") and "embed_positions" not in name}


def test_equal_seeds_make_equal_projectors_and_weights_stay_the_users() -> None:
    tensors = [dict(glued("cross_attention").named_parameters()) for _ in range(2)]
    assert all(torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items())
    llm = language_model()
    before = {name: tensor.clone() for name, tensor in llm.state_dict().items()}
    model = glued("mlp", llm)
    assert all(torch.equal(tensor, before[name]) for name, tensor in llm.state_dict().items())
    assert model.decoder.embed.weight is llm.get_input_embeddings().weight


def test_samples_do_not_see_each_other() -> None:
    """Neither in the encoders, nor in cross-attention, nor in a language model, packed or padded."""
    for family in ("Llama", "GPT2"):
        model = glued("cross_attention", language_model(family))
        alone = sum(model(batch([number])).loss_sum for number in range(6))
        assert_close(model(batch(range(6))).loss_sum, alone)


def test_modules_need_no_transformers_and_may_take_packed_rows() -> None:
    """An encoder in plain torch that takes the patches as they come, and a projector that is a module."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Linear(12, 8)

        def forward(self, patches: torch.Tensor, image_cu_seqlens: torch.Tensor) -> torch.Tensor:
            assert image_cu_seqlens[-1] == len(patches)
            return self.matrix(patches / 255)

    decoder = whole_model().to_empty(device="cpu").decoder
    initialise(decoder, 0)
    projector = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
    vision = EncoderModule(module=Rows(), width=8, projector=projector)
    model = GluedModel({"vision": vision}, decoder, **JOB)
    rows = [make_row(number, audio=False) for number in range(4)]
    model(packed(rows)).loss_sum.backward()
    assert float(vision.module.matrix.weight.grad.abs().sum()) > 0  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"a sample has \d recordings, and the model takes none"):
        model(batch([1]))


def test_callbacks_see_and_change_what_goes_in_and_comes_out() -> None:
    """CLIP with its class token, which the callback drops, from the layer before the last as LLaVA takes it."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": VISION, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    clip = CLIPVisionModel(CLIPVisionConfig(**sizes, patch_size=2, image_size=8, output_hidden_states=True))
    seen: dict[str, Any] = {}

    def without_class_token(inputs: dict[str, Any], output: Any) -> torch.Tensor:
        seen["sizes"], seen["pixels"] = inputs["sizes"], inputs["pixel_values"].shape
        return output.hidden_states[-2][:, 1:]

    def halved(tokens: torch.Tensor) -> torch.Tensor:
        seen["tokens"] = tokens.shape
        return tokens / 2

    def preprocess_llm(inputs: dict[str, Any]) -> dict[str, Any]:
        seen["llm"] = sorted(inputs)
        return {"inputs_embeds": inputs["inputs_embeds"] * 1.5}

    vision = EncoderModule(
        module=clip,
        preprocess_callback=pixel_values(),
        postprocess_module_callback=without_class_token,
        postprocess_projector_callback=halved,
    )
    model = GluedModel({"vision": vision}, language_model(), **JOB, preprocess_llm_callback=preprocess_llm)
    data = batch([2, 4])
    changed = model.embed(data)
    assert seen == {
        "sizes": ((1, 4, 4),) * 3,
        "pixels": (3, 3, 8, 8),
        "tokens": (12, LLM),
        "llm": ["input_ids", "inputs_embeds", "position_ids"],
    }
    model._preprocess_llm = None
    assert_close(changed, model.embed(data) * 1.5)


def test_a_tower_that_merges_patches_itself_says_its_stride() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Linear(12, VISION)

        def forward(self, patches: torch.Tensor) -> torch.Tensor:
            return self.matrix(patches).view(-1, MERGE**2, VISION).mean(dim=1)

    vision = EncoderModule(module=Pooled(), width=VISION, stride=MERGE**2, projector="linear")
    model = GluedModel({"vision": vision}, language_model(), **JOB)
    assert model.vision_projector.projection.in_features == VISION
    assert model(batch([2, 4])).loss_sum > 0


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "projector too narrow": (
        lambda: glued(nn.Linear(10, LLM)),
        r"does not take rows of 64 values, 4 of the encoder's width 16",
    ),
    "projector of another output": (
        lambda: glued(nn.Linear(64, 30)),
        r"maps 2 rows to the shape \(2, 30\), but the language model takes tokens of width 32",
    ),
    "no such projector": (lambda: glued("qformer"), "the projector is 'qformer'; it must be one of linear, mlp, cross_attention"),
    "no such encoder": (
        lambda: GluedModel({"video": EncoderModule(module=tower())}, language_model(), **JOB),
        "the encoders are video; name them vision and audio",
    ),
    "no width": (
        lambda: GluedModel({"vision": EncoderModule(module=nn.Linear(1, 1))}, language_model(), **JOB),
        r"a Linear, has no config that says its width: give width=",
    ),
    "a wrong width": (
        lambda: only_vision(width=12)(batch([2])),
        r"features of the shape \(2, 16, 16\), but 2 media of 16 rows make \(32, 12\)",
    ),
    "a class token": (
        lambda: only_vision(postprocess_module_callback=lambda _, output: output[0][:, [0, *range(16)]])(batch([2])),
        r"the vision encoder returns features of the shape \(2, 17, 16\), but 2 media of 16 rows make \(32, 16\)",
    ),
    "tokens of another width": (
        lambda: only_vision(postprocess_projector_callback=lambda tokens: tokens[:, :30])(batch([2])),
        r"returns tokens of the shape \(8, 30\), but the placeholders and the language model take \(8, 32\)",
    ),
    "inputs that do not fit": (
        lambda: only_vision(preprocess_callback=None)(batch([2])),
        r"takes pixel_values, .*, and there are image_grids, .*: give it a preprocess_callback",
    ),
    "images of several sizes": (
        lambda: pixel_values()({"sizes": ((1, 4, 4), (1, 2, 4)), "patch": 2, "merge": 2}),
        r"some of 4 x 8 and some of 8 x 8 pixels: set image.fit to square",
    ),
    "a recording that is too long": (
        lambda: input_features(10)({"sizes": (4, 12)}),
        "a recording has 12 mel frames, and input_features takes 10",
    ),
    "a stride that does not divide": (
        lambda: only_vision(stride=3),
        r"makes a row of 3 positions \(stride\), which do not divide the 4 of a token",
    ),
    "an audio stride of one": (
        lambda: GluedModel(
            {"audio": EncoderModule(module=whisper(), stride=1)}, language_model(), spec=SPEC, vocabulary=VOCABULARY
        ),
        "the audio encoder's stride is 1; it must be a multiple of 2",
    ),
    "more tokens than the llm embeds": (
        lambda: only_vision(vocabulary=Vocabulary(size=70, image_token=1, audio_token=-1)),
        "tokenizer has 70 tokens, but the language model embeds 66",
    ),
    "no placeholder": (
        lambda: only_vision(vocabulary=Vocabulary(size=64, image_token=-1, audio_token=2)),
        "there is a vision encoder, and the job's tokenizer has no token of image placeholders",
    ),
    "half precision": (
        lambda: GluedModel(encoders(), language_model().bfloat16(), **JOB),
        r"decoder.embed.weight are torch.bfloat16, and training holds float32",
    ),
    "dropout": (
        lambda: only_vision(projector=nn.Sequential(nn.Linear(64, LLM), nn.Dropout(0.1))),
        r"vision_projector.projection.1 drops values with probability 0.1",
    ),
    "a language model that is none": (
        lambda: glued(llm=tower()),
        "a SiglipVisionModel, is neither a causal one of transformers nor a Decoder",
    ),
    "a head with a bias": (lambda: glued(llm=language_model("Phi")), "logits of PhiForCausalLM are not .*: its head has a bias"),
    "a head with a scale": (lambda: glued(llm=scaled()), r"logits of GraniteForCausalLM are not .*: they are scaled"),
    "tokens added": (
        lambda: glued(preprocess_llm_callback=lambda given: {"inputs_embeds": given["inputs_embeds"][1:]})(batch([2])),
        r"inputs_embeds of the shape \(16, 32\), but the packed samples have \(17, 32\)",
    ),
    "a callback of a whole in units": (
        lambda: in_units(glued(preprocess_llm_callback=lambda given: given)),
        "preprocess_llm_callback is for training in one process",
    ),
    "a last token to drop": (
        lambda: GluedModel(encoders(), language_model(), spec=dropping(), vocabulary=VOCABULARY),
        "audio.last_token is drop, but this model pads",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_with_both_sizes(name: str) -> None:
    make, match = BAD[name]
    with pytest.raises(UserError, match=match):
        make()


def only_vision(vocabulary: Vocabulary = VOCABULARY, **options: Any) -> GluedModel:
    options = {"preprocess_callback": pixel_values(), **options}
    return GluedModel({"vision": EncoderModule(module=tower(), **options)}, language_model(), spec=SPEC, vocabulary=vocabulary)


def scaled() -> Any:
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {"hidden_size": LLM, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return GraniteForCausalLM(GraniteConfig(**sizes, num_key_value_heads=1, vocab_size=66, logits_scaling=2.0))


def dropping() -> Any:
    return parse_spec({**SPEC.model_dump(), "audio": {"mel_bins": 4, "last_token": "drop", "max_seconds": 1}})


@pytest.mark.parametrize(
    ("kind", "family", "units"),
    [
        ("mlp", "Llama", {"vision": {"frozen": True}, "audio": {"frozen": True, "checkpointing": True}, "llm": {"pp": 2}}),
        ("cross_attention", "Llama", {"encoder": {}, "llm": {"pp": 2}}),
        ("linear", "GPT2", {"vision": {}, "audio": {}, "llm": {}}),
    ],
)
def test_units_of_a_pipeline_are_the_glued_model(kind: str, family: str, units: dict[str, Any]) -> None:
    model, data = glued(kind, language_model(family)), batch(range(6))
    whole = in_units(model)
    topology = parse(PipelineTopology, {"units": units}, "topology")
    topology.check(topology.world_size, whole.shape)
    expected = model(data)
    expected.loss_sum.backward()
    cuts = bounds(topology, whole.shape, vocab_size=VOCABULARY.size, image=SPEC.image, audio=SPEC.audio)
    stages = {
        unit: [
            stage
            for number in range(size.pp)
            for stage in build_stages(
                whole.make,
                topology,
                Place(unit, 0, number, 0),
                cuts[unit],
                seed=0,
                device=torch.device("cpu"),
                slices=None,
                initialise=whole.initialise,
            )
        ]
        for unit, size in topology.units.items()
    }
    for unit in topology.units:
        settings = {"dtype": torch.float32, "image": SPEC.image, "audio": SPEC.audio}
        assert measure_kept(stages[unit][0], topology, Place(unit, 0, 0, 0), 0, **settings).of_row(()) > 0

    arrived = {unit: run(stages[unit], data, {}).rows for unit in topology.units if unit != "llm"}
    result = run(stages["llm"], data, arrived)
    assert result.loss is not None
    result.loss.loss_sum.backward()

    assert_close(result.loss.loss_sum, expected.loss_sum)
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    seen = set()
    for stage in (stage for unit in stages.values() for stage in unit):
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None and not name.startswith("decoder.embed"):  # tied, it may be in two stages
                assert_close(parameter.grad, gradients[name])
                seen.add(name)
    is_frozen = [unit for unit, size in topology.units.items() if size.frozen]
    assert seen == {name for name in gradients if name.split(".")[0] not in is_frozen and not name.startswith("decoder.embed")}


def test_nothing_in_a_glued_model_waits_for_a_gpu() -> None:
    """Once what follows from a microbatch is made beside it."""
    model, data, found = glued("cross_attention"), batch(range(6)), Counter[str]()
    images, recordings = model.image_inputs(data), model.audio_inputs(data)
    assert images is not None
    assert recordings is not None
    with watched(found):
        tokens = model.image_tokens(images).sum() + model.audio_tokens(recordings).sum()
        tokens.backward()
    assert not found


def test_an_encoder_is_not_cut() -> None:
    shape = in_units(glued()).shape
    for size, match in (
        ({"pp": 2}, "has 1 layers, too few for pp 2"),
        ({"tp": 2}, "tp 2 of unit 'vision' does not divide its heads 1"),
    ):
        topology = parse(PipelineTopology, {"units": {"vision": size, "audio": {}, "llm": {}}}, "topology")
        with pytest.raises(UserError, match=match):
            topology.check(topology.world_size, shape)
    with pytest.raises(UserError, match="the weights in the modules of make_model are pretrained"):
        OptimizerSpec().resolved("tiny", in_units(glued()).pretrained)
