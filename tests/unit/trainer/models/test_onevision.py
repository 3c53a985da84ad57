"""LLaVA-OneVision from image files to logits, beside the processor and the model of `transformers` on the same chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer

from headrace.errors import HeadraceError
from headrace.mapping import MappingSpec
from headrace.preprocessor.decoding import SampleProcessor
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.text import BUNDLED
from headrace.preprocessor.text.templates import TEMPLATES
from headrace.spec import parse_spec
from headrace.trainer import models
from headrace.trainer.loading.buffers import BufferPool
from headrace.trainer.loading.packs import collate_packs
from headrace.trainer.pipeline.kept_activations import measure_kept
from headrace.trainer.pipeline.topology import Place
from tests.unit.preprocessor.image.test_fit import encoded, photo
from tests.unit.preprocessor.text.test_named_templates import published, without_videos
from tests.unit.trainer.models.huggingface_world import assert_close
from tests.unit.trainer.models.published_models import family, our_logits
from tests.unit.trainer.models.test_published_models import chain, in_four

SIDE, MOST, SCALED = 56, 3, 2
"""Of a tile of 4 x 4 patches; tiles along each side; tiles whose tokens are not scaled down."""
SAMPLES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((170, 160),),  # 3 x 3 tiles, scaled down
    ((200, 44),),  # 1 x 3, padded above and below
    ((57, 230),),  # 3 x 1, padded on both sides
    ((30, 30),),  # one tile
    (),
    ((120, 50), (50, 50), (33, 80)),  # none is cut
)
"""Widths and heights of the images of each sample."""


class World:
    """A small model with random weights in a folder, with a tokenizer and a processor."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(BUNDLED))
        tokenizer.add_special_tokens(list(TEMPLATES["llava-onevision"].control))
        tokenizer.save(str(folder / "tokenizer.json"))
        image = {"fit": "anyres", "side": SIDE, "patch": 14, "merge": 1, "max_tiles_per_side": MOST, "anyres_max": SCALED}
        text = {"template": "llava-onevision", "tokenizer": str(folder / "tokenizer.json")}
        self.spec = parse_spec({"name": "ov", "sources": [{"path": "/x"}], "image": image, "text": text})
        self.ours = SampleProcessor(self.spec)
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens={"image_token": "<image>"})
        config = self._config(len(fast), fast.convert_tokens_to_ids("<image>"))
        torch.manual_seed(1)
        self.model = transformers.LlavaOnevisionForConditionalGeneration(config).eval()
        for parameter in self.model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
        self.model.save_pretrained(folder)
        self.theirs = self._processor(fast, config)

    def _config(self, size: int, image_token: int) -> Any:
        tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        llm: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        return transformers.LlavaOnevisionConfig(
            vision_config=transformers.SiglipVisionConfig(**tower, image_size=SIDE, patch_size=14, vision_use_head=False),
            text_config=transformers.Qwen2Config(**llm, vocab_size=size, num_key_value_heads=1),
            image_token_index=image_token,
            image_grid_pinpoints=[[SIDE * rows, SIDE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)],
            vision_aspect_ratio=f"anyres_max_{SCALED}",
        )

    def _processor(self, tokenizer: Any, config: Any) -> Any:
        from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
        from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

        half = [0.5] * 3
        size, sizes = {"height": SIDE, "width": SIDE}, config.image_grid_pinpoints
        return without_videos(
            LlavaOnevisionProcessor,
            image_processor=LlavaOnevisionImageProcessorPil(
                size=size, image_grid_pinpoints=sizes, image_mean=half, image_std=half
            ),
            tokenizer=tokenizer,
            video_processor=None,
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            vision_aspect_ratio=config.vision_aspect_ratio,
            chat_template=published("llava_onevision")(),
        )

    def inputs(self, chat: list[dict[str, Any]]) -> dict[str, Any]:
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        return dict(self.theirs.apply_chat_template([chat], **options))


def chat_of(images: list[Image.Image]) -> list[dict[str, Any]]:
    words = {"type": "text", "text": "What is the difference?"}
    answer = {"type": "text", "text": "None that I could see."}
    asked = [*({"type": "image", "image": image} for image in images), words]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": [answer]}]


def record_of(images: list[Image.Image]) -> Record:
    files = {str(number): encoded(image) for number, image in enumerate(images)}
    messages = [
        message | {"content": [{name: value for name, value in part.items() if name != "image"} for part in message["content"]]}
        for message in chat_of(images)
    ]
    return Record(key="k", fields={"messages": messages, "images": list(files)}, load=files.__getitem__)


def test_logits_are_those_of_the_published_processor_and_model(tmp_path: Path) -> None:
    world = World(tmp_path)
    source = world.spec.sources[0].model_copy(update={"mapping": MappingSpec()})
    samples = [[photo(*size) for size in sizes] for sizes in SAMPLES]
    rows = [world.ours.decode(record_of(images), source) for images in samples]
    batches = [world.ours.encode([number], [row]) for number, row in enumerate(rows)]
    packed = collate_packs(batches, [], world.spec, world.ours.vocabulary, BufferPool(max_idle_bytes=0))
    model = models.load(tmp_path, spec=world.spec, vocabulary=world.ours.vocabulary)

    inputs = [world.inputs(chat_of(images)) for images in samples]

    assert [row.input_ids.tolist() for row in rows] == [given["input_ids"][0].tolist() for given in inputs]
    with torch.no_grad():
        theirs = torch.cat([world.model(**given).logits[0] for given in inputs])
        assert_close(our_logits(model, packed), theirs)


def test_a_newline_that_begins_fresh_is_drawn_from_the_seed(tmp_path: Path) -> None:
    of = family("llava_onevision")
    of.config.save_pretrained(tmp_path)
    one, same, other = (of.model(tmp_path, seed).vision_projector.get_parameter("newline") for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 0.1 < float(one.detach().std()) < 0.4  # 1 / sqrt(24)


def test_tiles_that_the_size_of_their_image_does_not_have_are_told(tmp_path: Path) -> None:
    of = family("llava_onevision")
    of.config.save_pretrained(tmp_path)
    model, batch = of.model(tmp_path), of.batch(1)
    batch.image_sizes[0] = torch.tensor([16, 16])
    with pytest.raises(HeadraceError, match="an image of 16 x 16 pixels came in 9 tiles, and here has 1 x 1"):
        model(batch)


def test_what_a_stage_keeps_is_measured_on_images_that_are_not_cut(tmp_path: Path) -> None:
    of = family("llava_onevision")
    of.config.save_pretrained(tmp_path)
    topology = in_four(of)
    settings: dict[str, Any] = {"dtype": torch.float32, "image": of.spec.image, "audio": of.spec.audio}
    for unit, stages in chain(of, tmp_path, topology).items():
        for number, stage in enumerate(stages):
            assert measure_kept(stage, topology, Place(unit, 0, number, 0), 0, **settings).of_row(()) > 0
