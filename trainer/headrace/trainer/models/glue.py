"""Any encoder, projector and language model, joined into one model in Python, by the terms of Cornstarch (sections 3.2 and 5.1).

    tower, llm = SiglipVisionModel.from_pretrained(...), AutoModelForCausalLM.from_pretrained(...)
    vision = EncoderModule(tower, projector="mlp", preprocess_callback=pixel_values(mean=..., std=...))
    model = GluedModel({"vision": vision}, llm, spec=loader.spec, vocabulary=loader.vocabulary)
    model(microbatch.data)  # the summed loss

The modules keep their weights, `requires_grad` and methods: what is frozen before is frozen here, and `llm.save_pretrained`
writes what was learnt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UserError
from headrace.manifest import Vocabulary
from headrace.model_shape import ModelShape, TransformerShape
from headrace.spec import JobSpec
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.absent_units import NoAudio, NoProjector, NoVision
from headrace.trainer.models.audio_encoder import STRIDE, AudioEncoder
from headrace.trainer.models.decoder import Decoder
from headrace.trainer.models.encoder_module import EncoderModule, GluedAudio, GluedVision, Inputs, input_features, pixel_values
from headrace.trainer.models.multimodal import MultimodalModel, initialise
from headrace.trainer.models.padded_decoder import PaddedDecoder
from headrace.trainer.models.projector import Projector
from headrace.trainer.models.projector_kinds import ChosenProjector
from headrace.trainer.models.vision_encoder import VisionEncoder
from headrace.trainer.models.whole_model import WholeModel

__all__ = ["EncoderModule", "GluedModel", "in_units", "input_features", "pixel_values"]

Preprocess = Callable[[Inputs], Inputs]


class GluedModel(MultimodalModel):
    """Maps a PackedMicrobatch to its loss, as does every `MultimodalModel`, by modules of the user's."""

    def __init__(
        self,
        encoders: Mapping[str, EncoderModule],
        language_model: nn.Module,
        *,
        spec: JobSpec,
        vocabulary: Vocabulary,
        preprocess_llm_callback: Preprocess | None = None,
    ) -> None:
        """encoders: by "vision" and "audio", one or both. language_model: a causal one of `transformers`, whose attention is set
        to packed sequences where it is a Llama, Qwen2, Qwen3 or Mistral (all others get a padded row a sample), or a `Decoder`.
        spec, vocabulary: of the job, as the loader has them. preprocess_llm_callback: takes and returns `inputs_embeds` (T,
        width), in which tokens of media are in their places, beside `input_ids` and `position_ids`.

        Raises UserError where the modules do not fit each other or the job, naming both sizes.
        """
        nn.Module.__init__(self)
        unknown = encoders.keys() - {"vision", "audio"}
        if unknown or not encoders:
            raise UserError(f"the encoders are {', '.join(encoders) or 'none'}; name them vision and audio, one or both")
        self.image_token_id = _placeholder("vision", "image", encoders, vocabulary.image_token)
        self.audio_token_id = _placeholder("audio", "audio", encoders, vocabulary.audio_token)
        self.decoder = _decoder(language_model, vocabulary)
        self.generator = self.generator_projector = None
        self._preprocess_llm = preprocess_llm_callback
        vision: VisionEncoder = NoVision("the model")
        audio: AudioEncoder = NoAudio("the model")
        vision_projector: Projector = NoProjector()
        audio_projector: Projector = NoProjector()
        if "vision" in encoders:
            vision = GluedVision(encoders["vision"], spec.image)
            vision_projector = self._projector(encoders["vision"], "vision", spec.image.merge**2, 1)
        if "audio" in encoders:
            if spec.audio.last_token == "drop":
                raise UserError("audio.last_token is drop, but this model pads the last token of a recording: set it to pad")
            audio = GluedAudio(encoders["audio"])
            audio_projector = self._projector(encoders["audio"], "audio", spec.audio.frames_per_token, STRIDE)
        self.vision, self.vision_projector = vision, vision_projector
        self.audio, self.audio_projector = audio, audio_projector
        for unit, encoder in encoders.items():
            if not isinstance(encoder.projector, nn.Module):
                initialise(nn.ModuleDict({f"{unit}_projector": self.get_submodule(f"{unit}_projector")}), spec.seed)
        _check_weights(self)

    def embed(self, microbatch: PackedMicrobatch) -> Tensor:
        """Return the decoder's input (T, width), after the callback. Raises UserError where it returns another shape."""
        x = super().embed(microbatch)
        if self._preprocess_llm is None:
            return x
        tokens = microbatch.to(x.device)
        inputs = {"inputs_embeds": x, "input_ids": tokens.input_ids, "position_ids": tokens.position_ids}
        found: Tensor = self._preprocess_llm(inputs)["inputs_embeds"]
        if found.shape != x.shape:
            raise UserError(
                f"preprocess_llm_callback returns inputs_embeds of the shape {tuple(found.shape)}, but the packed samples have "
                f"{tuple(x.shape)}: tokens can be changed there, and not added or dropped"
            )
        return found

    def _projector(self, encoder: EncoderModule, unit: str, positions: int, before: int) -> ChosenProjector:
        """positions: patches or mel frames of a token. before: how many of them are counted as one in `Projector.groups`."""
        stride = encoder.stride_of(unit)
        if positions % stride:
            what = "image.merge squared, patches" if unit == "vision" else "audio.frames_per_token, mel frames"
            raise UserError(
                f"the {unit} encoder makes a row of {stride} positions (stride), which do not divide the {positions} of a token "
                f"in the job ({what})"
            )
        return ChosenProjector(
            encoder.projector,
            width_in=encoder.width_of(unit),
            group=positions // stride,
            width_out=self.decoder.width,
            stride=stride // before,
            postprocess=encoder.postprocess_projector_callback,
        )


def in_units(model: GluedModel, *, name: str = "tiny") -> WholeModel:
    """Return the model for a pipeline, of which each process builds its unit with the weights that `model` has.

    name: of the job's size of model, for which the optimizer's settings are completed.

    An encoder is one layer, which cannot be cut, and so is an llm whose samples are padded. Raises UserError for a model with
    `preprocess_llm_callback`, as no unit has the whole of what that sees.
    """
    if model._preprocess_llm is not None:
        raise UserError("preprocess_llm_callback is for training in one process, and this is a pipeline: leave it out")
    weights = {id(tensor): _on_meta(tensor) for tensor in (*model.parameters(), *model.buffers())}
    tensors = dict(_named(model))

    def make() -> MultimodalModel:
        made = copy.deepcopy(model, dict(weights))
        if isinstance(made.decoder, PaddedDecoder):
            made.decoder.drop_second_embedding()
        return made

    @torch.no_grad()
    def fill(stage: MultimodalModel, _: int) -> None:
        for of_stage, tensor in _named(stage):
            tensor.copy_(tensors[of_stage])

    return WholeModel(name=name, shape=_shape(model), make=make, initialise=fill, pretrained=("the modules of make_model",))


def _decoder(language_model: Any, vocabulary: Vocabulary) -> Decoder:
    decoder: Decoder
    if isinstance(language_model, Decoder):
        decoder = language_model
    else:
        from headrace.trainer.models.huggingface.llm import FAMILIES, AdaptedDecoder

        kind = getattr(getattr(language_model, "config", None), "model_type", None)
        decoder = AdaptedDecoder.of_model(language_model) if kind in FAMILIES else PaddedDecoder(language_model)
    if vocabulary.size > decoder.embed.num_embeddings:
        raise UserError(
            f"the job's tokenizer has {vocabulary.size} tokens, but the language model embeds {decoder.embed.num_embeddings}: "
            "set the job's text.tokenizer to that of the model, or let it embed more by resize_token_embeddings"
        )
    return decoder


def _placeholder(unit: str, medium: str, encoders: Mapping[str, EncoderModule], token: int) -> int:
    if unit not in encoders:
        return -1
    if token < 0:
        raise UserError(f"there is a {unit} encoder, and the job's tokenizer has no token of {medium} placeholders")
    return token


def _check_weights(model: nn.Module) -> None:
    """Raise UserError for weights in half precision, which would lose what they learn, and for dropout."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise UserError(f"the weights of {name} are {parameter.dtype}, and training holds float32: load them with that dtype")
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise UserError(
                f"{name} drops values with probability {module.p}, by which a step would depend on its division into "
                "microbatches: set it to 0 in the model's configuration"
            )


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers by name, those with two names twice."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _shape(model: GluedModel) -> ModelShape:
    """Return the sizes by which a pipeline weighs layers: those of an opaque one give the number of its matrices' elements."""
    decoder = model.decoder
    config = getattr(decoder, "config", None)
    if config is None:
        llm = _opaque(decoder.layers, decoder.width)
    else:
        from headrace.trainer.models.huggingface.llm import shape_of_decoder

        llm = shape_of_decoder(config)
    return ModelShape(
        vision=_opaque(model.vision.layers, model.vision.width), audio=_opaque(model.audio.layers, model.audio.width), llm=llm
    )


def _opaque(layers: nn.ModuleList, width: int) -> TransformerShape:
    width = max(1, width)
    elements = sum(parameter.numel() for parameter in layers.parameters() if parameter.ndim > 1) // max(1, len(layers))
    mlp = max(1, elements // (2 * width) - 2 * width)
    return TransformerShape(layers=len(layers), width=width, heads=1, kv_heads=1, mlp=mlp, gated=False)
