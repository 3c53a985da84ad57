"""Tiny models of every published family with random weights, samples for them, and what `transformers` answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers
from torch import Tensor

from headrace.anyres import anyres, image_of_sample
from headrace.manifest import Vocabulary
from headrace.sample import LABEL_IGNORED, SCHEMA
from headrace.spec import JobSpec, parse_spec
from headrace.trainer.loading.buffers import BufferPool
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.packs import collate_packs
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.huggingface.model import adapted_model, initialise
from headrace.trainer.models.multimodal import MultimodalModel
from tests.verify.batches import SHAPE

VOCAB, IMAGE_TOKEN, AUDIO_TOKEN = 64, 1, 2
PATCH, MERGE, BINS = 4, 2, 4
FRAMES = 40
"""Of every recording: what the encoder of Qwen2-Audio takes, which pads all of them with silence to one length."""
_LLM = {
    "vocab_size": VOCAB + 3,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.1,
    "bos_token_id": 3,
    "eos_token_id": 4,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
_QWEN = {"patch_size": PATCH, "spatial_merge_size": MERGE, "num_heads": 4, "depth": 4, "initializer_range": 0.1}
_VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": PATCH}
_IMAGE = {"patch": PATCH, "merge": MERGE, "min_pixels": 64, "max_pixels": 65536}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A published family in the smallest size."""

    name: str
    config: Any
    spec: JobSpec
    """Of a job that feeds it."""
    grids: Sequence[Sequence[int]] = ()
    """Sizes in patches that its images may have; empty: it takes recordings."""
    sizes: Sequence[tuple[int, int]] = ()
    """Heights and widths in pixels of images that are cut into tiles of one of these grids, by their size."""

    @property
    def vocabulary(self) -> Vocabulary:
        image, audio = (IMAGE_TOKEN, -1) if self.grids else (-1, AUDIO_TOKEN)
        return Vocabulary(size=VOCAB, image_token=image, audio_token=audio)

    def original(self, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """The model of `transformers`, which is then in the folder, as published."""
        torch.manual_seed(seed)
        model = getattr(transformers, ARCHITECTURES[self.name])(self.config)
        for parameter in model.parameters():  # what would begin at zero could be mistaken
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
        model.to(dtype).save_pretrained(folder)
        return model.eval()

    def skeleton(self, folder: Path) -> MultimodalModel:
        """Ours, of that folder, on the meta device."""
        image_token, audio_token = self.vocabulary.image_token, self.vocabulary.audio_token
        return adapted_model(
            HuggingFaceUnits(whole=folder),
            SHAPE,
            vocab_size=VOCAB,
            image=self.spec.image,
            audio=self.spec.audio,
            image_token_id=image_token,
            audio_token_id=audio_token,
        )

    def model(self, folder: Path, seed: int = 0) -> MultimodalModel:
        """Ours, of that folder, with weights."""
        model = self.skeleton(folder)
        model.to_empty(device="cpu")
        initialise(model, seed)
        return model

    def batch(self, count: int, begin: int = 0) -> PackedMicrobatch:
        """So many samples with text and none, one or several media, as a job delivers them."""
        rows = [pa.RecordBatch.from_pylist([self._row(begin + number)], schema=SCHEMA) for number in range(count)]
        return collate_packs(rows, [], self.spec, self.vocabulary, BufferPool(max_idle_bytes=0))

    def _row(self, sample: int) -> dict[str, Any]:
        dice = np.random.default_rng(sample)
        number = (1, 2, 0, 1)[sample % 4]
        chosen = [self.grids[int(dice.integers(len(self.grids)))] for _ in range(number)] if self.grids else []
        frames = [] if self.grids else [FRAMES] * number
        merge = self.spec.image.merge**2
        tokens = [[IMAGE_TOKEN] * (h * w // merge) for _, h, w in chosen]
        chosen, sizes, of_tiles = self._tiled(chosen, sample)
        for placeholders, count in zip(tokens, of_tiles, strict=False):
            placeholders += [IMAGE_TOKEN] * count
        tokens += [[AUDIO_TOKEN] * self.spec.audio.num_tokens(count) for count in frames]
        ids = [*dice.integers(5, VOCAB, 3)]
        for of_medium in tokens:
            ids += [*of_medium, *dice.integers(5, VOCAB, 2)]
        answer = [*dice.integers(5, VOCAB, 6)]
        patches = sum(h * w for _, h, w in chosen)
        return {
            "sample_id": sample,
            "input_ids": np.array([*ids, *answer], np.int32),
            "labels": np.array([LABEL_IGNORED] * len(ids) + answer, np.int32),
            "patches": dice.integers(0, 256, patches * 3 * self.spec.image.patch**2, dtype=np.uint8),
            "image_grids": chosen,
            "mel": dice.standard_normal(sum(frames) * BINS).astype(np.float16),
            "mel_frames": frames,
            "flags": 0,
            "image_sizes": sizes,
        }

    def _tiled(self, chosen: list[Sequence[int]], sample: int) -> tuple[list[Sequence[int]], list[tuple[int, int]], list[int]]:
        """The grids of all tiles, the sizes that come with them, and the tokens of each image behind those of its first tile."""
        if not self.sizes:
            return chosen, [], []
        grids, sizes, tokens = [], [], []
        for number, grid in enumerate(chosen):
            height, width = self.sizes[(sample + number) % len(self.sizes)]
            tiles = anyres(width, height, image_of_sample(self.spec.image, len(chosen)))
            count = tiles.rows * tiles.columns
            grids += [grid] * (1 + count)
            sizes += [(height, width), *[(0, 0)] * count]
            tokens.append(tiles.tokens)
        return grids, sizes, tokens


ARCHITECTURES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
}


def _spec(**sections: Any) -> JobSpec:
    return parse_spec({"name": "published", "sources": [{"name": "a", "path": "/a"}], **sections})


def family(name: str) -> Family:
    """The family of a `model_type`."""
    text = {**_LLM, "rope_parameters": _MROPE}
    match name:
        case "qwen2_5_vl":
            vision = {**_QWEN, "hidden_size": 32, "intermediate_size": 48, "window_size": 4 * PATCH, "out_hidden_size": 24}
            config = transformers.Qwen2_5_VLConfig(
                vision_config={**vision, "fullatt_block_indexes": [1, 3]}, text_config=text, image_token_id=IMAGE_TOKEN
            )
        case "qwen2_vl":
            vision = {**_QWEN, "embed_dim": 32, "hidden_size": 24, "mlp_ratio": 2}
            config = transformers.Qwen2VLConfig(
                vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, tie_word_embeddings=True
            )
        case "llava":
            tower = transformers.CLIPVisionConfig(**_VIT, image_size=4 * PATCH)
            config = transformers.LlavaConfig(
                vision_config=tower, text_config=transformers.LlamaConfig(**_LLM), image_token_index=IMAGE_TOKEN
            )
            return Family(name=name, config=config, spec=_spec(image={**_IMAGE, "merge": 1}), grids=((1, 4, 4),))
        case "llava_onevision":
            tower = transformers.SiglipVisionConfig(**_VIT, image_size=4 * PATCH, vision_use_head=False)
            config = transformers.LlavaOnevisionConfig(
                vision_config=tower,
                text_config=transformers.Qwen2Config(**_LLM),
                image_token_index=IMAGE_TOKEN,
                image_grid_pinpoints=[[16 * rows, 16 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)],
                vision_aspect_ratio="anyres_max_2",
            )
            image = {"patch": PATCH, "merge": 1, "fit": "anyres", "side": 16, "max_tiles_per_side": 3, "anyres_max": 2}
            sizes = ((48, 48), (20, 70), (16, 16), (90, 30), (31, 45))
            return Family(name=name, config=config, spec=_spec(image=image), grids=((1, 4, 4),), sizes=sizes)
        case "internvl":
            tower = transformers.InternVLVisionConfig(**_VIT, image_size=4 * PATCH)
            config = transformers.InternVLConfig(
                vision_config=tower, text_config=transformers.Qwen2Config(**_LLM), image_token_id=IMAGE_TOKEN
            )
            return Family(name=name, config=config, spec=_spec(image=_IMAGE), grids=((1, 4, 4),))
        case "qwen2_audio":
            encoder = {"num_mel_bins": BINS, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4}
            config = transformers.Qwen2AudioConfig(
                audio_config={**encoder, "encoder_ffn_dim": 48, "max_source_positions": FRAMES // 2, "initializer_range": 0.1},
                text_config=transformers.Qwen2Config(**_LLM),
                audio_token_index=AUDIO_TOKEN,
            )
            audio = {"mel_bins": BINS, "frames_per_token": 4, "last_token": "drop", "max_seconds": FRAMES / 100}
            return Family(name=name, config=config, spec=_spec(audio=audio))
        case _:
            raise AssertionError(name)
    grids = ((1, 6, 10), (1, 2, 2), (1, 8, 8), (1, 4, 6))
    return Family(name=name, config=config, spec=_spec(image=_IMAGE, mrope=True), grids=grids)


def load(of: Family, folder: Path) -> Any:
    """The model of `transformers` from a folder."""
    return getattr(transformers, ARCHITECTURES[of.name]).from_pretrained(folder).eval()


def our_logits(model: MultimodalModel, batch: PackedMicrobatch) -> Tensor:
    """(T, vocabulary) of a packed microbatch."""
    hidden = model.decoder(model.embed(batch), model.decoder.positions(batch), Segments.of(batch.cu_seqlens))
    return hidden @ model.decoder.output_weight.T


def their_logits(original: Any, batch: PackedMicrobatch) -> Tensor:
    """The same of `transformers`, sample by sample."""
    found, image, recording = [], 0, 0
    for sample in range(len(batch.sample_ids)):
        start, end = batch.cu_seqlens[sample : sample + 2].tolist()
        ids = batch.input_ids[None, start:end]
        images = int(batch.images_per_sample[sample])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images:
            grids = batch.image_grids[image : image + images]
            first, last = batch.image_cu_seqlens[[image, image + images]].tolist()
            inputs |= _images(original.config, batch.patches[first:last], grids, ids)
            if len(batch.image_sizes):
                inputs |= _tiles(inputs["pixel_values"], batch.image_sizes[image : image + images])
        if recordings := int(batch.recordings_per_sample[sample]):
            mel = batch.mel.view(-1, FRAMES, BINS)[recording : recording + recordings].float().transpose(1, 2)
            inputs |= {"input_features": mel, "feature_attention_mask": torch.ones(recordings, FRAMES, dtype=torch.int64)}
        image, recording = image + images, recording + recordings
        found.append(original(**inputs).logits[0])
    return torch.cat(found)


def _images(config: Any, patches: Tensor, grids: Tensor, ids: Tensor) -> dict[str, Tensor]:
    of_family = {"internvl": "IMAGENET_DEFAULT", "llava_onevision": "IMAGENET_STANDARD"}
    frame = _standardised(patches, of_family.get(config.model_type, "OPENAI_CLIP"))
    if config.model_type in ("llava", "llava_onevision", "internvl"):
        _, height, width = grids[0].tolist()
        merge = MERGE if config.model_type == "internvl" else 1
        blocks = frame.view(len(grids), height // merge, width // merge, merge, merge, 3, PATCH, PATCH)
        return {"pixel_values": blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(len(grids), 3, height * PATCH, width * PATCH)}
    pixels = torch.stack((frame, frame), dim=2).flatten(1)  # channel, frame, row, column
    return {"pixel_values": pixels, "image_grid_thw": grids.long(), "mm_token_type_ids": (ids == IMAGE_TOKEN).int()}


def _tiles(pictures: Tensor, sizes: Tensor) -> dict[str, Tensor]:
    """(images, most tiles, 3, height, width), as `LlavaOnevisionProcessor` gives them for one sample."""
    first = sizes[:, 0].nonzero().squeeze(1)
    of_image = torch.tensor_split(pictures, first[1:])
    pixels = torch.nn.utils.rnn.pad_sequence(of_image, batch_first=True)
    return {"pixel_values": pixels, "image_sizes": sizes[first].long(), "batch_num_images": torch.tensor([len(first)])}


def _standardised(patches: Tensor, constants: str) -> Tensor:
    """(P, 3, patch * patch)."""
    mean, std = (torch.tensor(getattr(transformers.image_utils, f"{constants}_{kind}"))[:, None] for kind in ("MEAN", "STD"))
    return (patches.view(len(patches), 3, -1) / 255 - mean) / std
