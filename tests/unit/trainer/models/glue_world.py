"""Modules of `transformers` to be glued, samples for them, and the same forward written by hand, sample by sample."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import headrace.trainer.models.huggingface  # noqa: F401  torchaudio must load before transformers looks for it
from headrace.manifest import Vocabulary
from headrace.sample import LABEL_IGNORED
from headrace.spec import JobSpec, parse_spec
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.models.glue import EncoderModule, GluedModel, input_features, pixel_values
from headrace.trainer.models.projector_kinds import CrossAttention
from tests.verify.batches import AUDIO_TOKEN, IMAGE_TOKEN, VOCAB, packed

PATCH, MERGE, SIDE, BINS, FRAMES = 2, 2, 4, 4, 24
"""Images have SIDE x SIDE patches, and recordings up to FRAMES mel frames, of which 8 become a token."""
VISION, AUDIO, LLM = 16, 24, 32
"""Widths."""
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
SPEC: JobSpec = parse_spec(
    {
        "name": "glued",
        "sources": [{"name": "a", "path": "/a"}],
        "image": {"patch": PATCH, "merge": MERGE, "fit": "square", "side": SIDE * PATCH},
        "audio": {"mel_bins": BINS, "max_seconds": FRAMES / 100},
    }
)
VOCABULARY = Vocabulary(size=VOCAB, image_token=IMAGE_TOKEN, audio_token=AUDIO_TOKEN)


def tower(seed: int = 0, **options: Any) -> Any:
    """SigLIP's, whose features are a row for each patch."""
    sizes = {"hidden_size": VISION, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return made(transformers.SiglipVisionModel, transformers.SiglipVisionConfig, seed, **sizes, **options, **_IMAGES)


def whisper(seed: int = 1) -> Any:
    """Its encoder, which takes recordings of one length only."""
    sizes = {"d_model": AUDIO, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": BINS}
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(**sizes, dropout=0.0, max_source_positions=FRAMES // 2)
    return enlarged(transformers.models.whisper.modeling_whisper.WhisperEncoder(config))


def language_model(family: str = "Llama", seed: int = 2) -> Any:
    """Llama runs packed, and the others padded."""
    match family:
        case "GPT2":
            off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 3, "eos_token_id": 3}
            config = {"n_embd": LLM, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB + 2, **off}
            return made(transformers.GPT2LMHeadModel, transformers.GPT2Config, seed, **config)
        case "Gemma3":
            return made(transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, seed, **_DECODER, head_dim=16)
    return made(getattr(transformers, f"{family}ForCausalLM"), getattr(transformers, f"{family}Config"), seed, **_DECODER)


_IMAGES = {"patch_size": PATCH, "image_size": SIDE * PATCH}
_DECODER = {
    "hidden_size": LLM,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB + 2,
}


def made(model: Any, config: Any, seed: int, **options: Any) -> Any:
    """A model with fresh weights."""
    torch.manual_seed(seed)
    return enlarged(model(config(**options)))


def enlarged(model: nn.Module) -> nn.Module:
    """Weights larger than at the start, biases too, so that every path shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def encoders(projector: Any = "mlp", **options: Any) -> dict[str, EncoderModule]:
    """Of images and of recordings."""
    return {
        "vision": EncoderModule(
            module=tower(), projector=projector, preprocess_callback=pixel_values(mean=MEAN, std=STD), **options
        ),
        "audio": EncoderModule(module=whisper(), projector=projector, preprocess_callback=input_features(FRAMES)),
    }


def glued(projector: Any = "mlp", llm: Any = None, **options: Any) -> GluedModel:
    """All of them joined."""
    return GluedModel(encoders(projector), llm or language_model(), spec=SPEC, vocabulary=VOCABULARY, **options)


def batch(numbers: Sequence[int]) -> PackedMicrobatch:
    """These samples, which have text, and none, one or two media of each kind."""
    return packed([_row(number) for number in numbers])


def _row(sample: int) -> dict[str, Any]:
    dice = np.random.default_rng(sample)
    images, frames = sample % 3, [int(dice.integers(1, FRAMES + 1)) for _ in range(sample % 2)]
    tokens = [IMAGE_TOKEN] * (images * SIDE**2 // MERGE**2) + [AUDIO_TOKEN] * sum(-(-count // 8) for count in frames)
    words, answer = dice.integers(3, VOCAB, 4), dice.integers(3, VOCAB, 5)
    ids = [*words[:2], *tokens, *words[2:], *answer]
    return {
        "sample_id": sample,
        "input_ids": np.array(ids, np.int32),
        "labels": np.array([LABEL_IGNORED] * (len(ids) - 5) + [*answer], np.int32),
        "patches": dice.integers(0, 256, images * SIDE**2 * 3 * PATCH**2, dtype=np.uint8),
        "image_grids": [[1, SIDE, SIDE]] * images,
        "mel": dice.standard_normal(sum(frames) * BINS).astype(np.float16),
        "mel_frames": frames,
        "flags": 0,
    }


class ByHand(nn.Module):
    """What a GluedModel is compared with: copies of its modules, called sample by sample as their authors do."""

    def __init__(self, model: GluedModel, llm: Any) -> None:
        """llm: of equal weights, before it was glued."""
        super().__init__()
        units = {"vision": model.vision, "audio": model.audio}
        self.towers = nn.ModuleDict({unit: copy.deepcopy(found.layers[0].module) for unit, found in units.items()})
        projectors = {"vision": model.vision_projector, "audio": model.audio_projector}
        self.projectors = nn.ModuleDict({unit: copy.deepcopy(found.projection) for unit, found in projectors.items()})
        self.llm = llm

    def forward(self, data: PackedMicrobatch) -> Tensor:
        """The summed loss."""
        total, image, recording = torch.zeros(()), 0, 0
        for sample in range(len(data.sample_ids)):
            start, end = data.cu_seqlens[sample : sample + 2].tolist()
            ids = data.input_ids[start:end]
            x = self.llm.get_input_embeddings()(ids)
            for _ in range(int(data.images_per_sample[sample])):
                first, last = data.image_cu_seqlens[image : image + 2].tolist()
                tokens = self.of_image(data.patches[first:last])
                x = self.filled(x, ids, IMAGE_TOKEN, tokens, image - int(data.images_per_sample[:sample].sum()))
                image += 1
            for _ in range(int(data.recordings_per_sample[sample])):
                first, last = data.mel_cu_seqlens[recording : recording + 2].tolist()
                tokens = self.of_recording(data.mel[first:last])
                x = x.index_copy(0, (ids == AUDIO_TOKEN).nonzero()[:, 0], tokens)
                recording += 1
            logits = self.llm(inputs_embeds=x[None]).logits[0]
            total = total + functional.cross_entropy(logits, data.labels[start:end], ignore_index=LABEL_IGNORED, reduction="sum")
        return total

    def filled(self, x: Tensor, ids: Tensor, token: int, tokens: Tensor, number: int) -> Tensor:
        """The tokens of the sample's image `number`."""
        begin = number * len(tokens)
        return x.index_copy(0, (ids == token).nonzero()[begin : begin + len(tokens), 0], tokens)

    def of_image(self, patches: Tensor) -> Tensor:
        """An image is put together pixel by pixel, and its rows are joined group by group."""
        pixels = torch.zeros(3, SIDE * PATCH, SIDE * PATCH)
        groups = [(row, column) for row in range(0, SIDE, MERGE) for column in range(0, SIDE, MERGE)]
        order = [(row + i, column + j) for row, column in groups for i in range(MERGE) for j in range(MERGE)]
        for values, (row, column) in zip(patches.view(-1, 3, PATCH, PATCH), order, strict=True):
            pixels[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = values / 255
        normed = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        features = self.towers["vision"](pixel_values=normed[None]).last_hidden_state[0]
        features = torch.stack([features[row * SIDE + column] for row, column in order])
        return self.project("vision", features, MERGE**2)

    def of_recording(self, mel: Tensor) -> Tensor:
        padded = torch.cat((mel.float(), torch.zeros(FRAMES - len(mel), BINS)))
        features = self.towers["audio"](padded.T[None]).last_hidden_state[0, : -(-len(mel) // 2)]
        return self.project("audio", features, 4)

    def project(self, unit: str, features: Tensor, group: int) -> Tensor:
        """What joins the rows of a group, the last of which may be filled up."""
        module: Any = self.projectors[unit]
        missing = -len(features) % group
        joined = torch.cat((features, torch.zeros(missing, features.shape[1]))).reshape(-1, group * features.shape[1])
        if not isinstance(module, CrossAttention):
            return module(joined)
        x, query = module.norm(features), module.query(joined)
        key, value = module.key(x), module.value(x)
        scores = (query @ key.T / LLM**0.5).softmax(dim=1)  # LLM / 64 heads are one
        return query + module.out(scores @ value)
