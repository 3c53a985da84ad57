"""Templates of models with tiles, rows and recordings: the tokens that their processors in `transformers` give, by name and from
the chat template beside the tokenizer.

The processors get images and recordings of random sizes, and say themselves how many tokens those have.
"""

from __future__ import annotations

import inspect
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image as Picture
from tokenizers import Tokenizer

from headrace.mapping import MappingSpec
from headrace.preprocessor.decoding import SampleProcessor
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.text import BUNDLED
from headrace.preprocessor.text.templates import TEMPLATES
from headrace.spec import parse_spec
from tests.unit.preprocessor.image.test_fit import PAN_AND_SCAN, encoded
from tests.unit.preprocessor.text.random_chats import Abilities, Chat, Chats

transformers = pytest.importorskip("transformers")

PUBLISHED = Path(__file__).parents[3] / "data" / "chat_templates" / "published"
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A published model: its template, and how `transformers` prepares its input."""

    template: str = ""
    """The name of its template, where that is not the model's."""
    is_own: bool = False
    """Whether only the chat template beside the tokenizer gives this format, and no named one."""
    processor: Callable[[Any, str], Any]
    """Makes the processor of a tokenizer and a chat template."""
    chat_template: Callable[[], str]
    abilities: Abilities = field(default_factory=lambda: Abilities(images=True))
    job: dict[str, Any] = field(default_factory=dict)
    """The job's sections `image` and `audio`, as docs/data.md has them."""
    images: dict[str, Any] = field(default_factory=dict)
    """How the processor is to be called for images."""
    named: dict[str, str] = field(default_factory=dict)
    """Names that the tokenizer has for its tokens."""
    bos: str | None = None
    eos: str = "<|im_end|>"
    largest: int = 600
    """Longest side of the images, in pixels."""
    parts_only: bool = False
    nested: bool = False
    """Whether the processor gets the images of a sample as a list of its own, as `apply_chat_template` gives them."""
    strings_from: str = ""
    """The role whose words are a string for the template, and not a list of parts."""


def _file(medium: Any) -> bytes:
    """A medium as a file: PNG or WAV."""
    if isinstance(medium, Picture.Image):
        return encoded(medium)
    buffer = io.BytesIO()
    soundfile.write(buffer, medium, 16_000, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


def without_videos(processor: type[Any], **parts: Any) -> Any:
    """A processor that is made without its part for videos, which needs torchvision."""

    class Made(processor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    return Made(**parts)


def qwen3_vl(tokenizer: Any, template: str) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    images = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)
    return without_videos(
        Qwen3VLProcessor, image_processor=images, tokenizer=tokenizer, video_processor=None, chat_template=template
    )


def internvl(tokenizer: Any, template: str) -> Any:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    images = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448})
    return without_videos(
        InternVLProcessor, image_processor=images, tokenizer=tokenizer, video_processor=None, chat_template=template
    )


def gemma3(tokenizer: Any, template: str) -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    images = Gemma3ImageProcessorPil(size={"height": 8, "width": 8})  # an image has 256 tokens whatever its size
    return Gemma3Processor(image_processor=images, tokenizer=tokenizer, chat_template=template)


def pixtral(tokenizer: Any, template: str) -> Any:
    from transformers.models.pixtral import image_processing_pil_pixtral as by_pillow

    with pytest.MonkeyPatch.context() as patch:  # its twin, of which one function is imported, needs torchvision
        patch.setitem(sys.modules, "transformers.models.pixtral.image_processing_pixtral", by_pillow)
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor
    return PixtralProcessor(image_processor=by_pillow.PixtralImageProcessorPil(), tokenizer=tokenizer, chat_template=template)


def smolvlm(tokenizer: Any, template: str) -> Any:
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    processing_smolvlm.num2words = str  # a package for videos alone
    images = SmolVLMImageProcessorPil(size={"longest_edge": 1024}, max_image_size={"longest_edge": 256})
    options = {"image_seq_len": 16, "video_processor": None}
    return without_videos(
        processing_smolvlm.SmolVLMProcessor, image_processor=images, tokenizer=tokenizer, chat_template=template, **options
    )


def llava_onevision(tokenizer: Any, template: str) -> Any:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    return without_videos(
        LlavaOnevisionProcessor,
        image_processor=LlavaOnevisionImageProcessorPil(),
        tokenizer=tokenizer,
        video_processor=None,
        num_image_tokens=729,
        vision_feature_select_strategy="full",
        chat_template=template,
    )


def qwen2_audio(tokenizer: Any, template: str) -> Any:
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    sounds = WhisperFeatureExtractor(feature_size=128)
    return Qwen2AudioProcessor(feature_extractor=sounds, tokenizer=tokenizer, chat_template=template)


def smolvlm_template() -> str:
    from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

    return str(DEFAULT_CHAT_TEMPLATE)


def qwen2_audio_template() -> str:
    from transformers import Qwen2AudioProcessor

    return str(inspect.getattr_static(Qwen2AudioProcessor, "default_chat_template").fget(None))


def published(name: str) -> Callable[[], str]:
    return lambda: (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")


MODELS = {
    "qwen3-vl": Model(
        processor=qwen3_vl,
        chat_template=published("qwen3_vl"),
        job={"image": {"patch": 16, "merge": 2, "min_pixels": 65536, "max_pixels": 16777216}},
    ),
    "internvl": Model(
        processor=internvl,
        chat_template=published("internvl"),
        job={"image": {"fit": "tiles", "side": 448, "patch": 14, "merge": 2, "max_tiles": 12}},
        named={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
        | {"video_token": "<|endoftext|>"},
    ),
    "gemma3": Model(
        processor=gemma3,
        chat_template=published("gemma3"),
        job={"image": {"fit": "square", "side": 896, "patch": 14, "merge": 4, "resample": "bilinear"}},
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        bos="<bos>",
        eos="<eos>",
    ),
    "gemma3, crops": Model(
        template="gemma3",
        processor=gemma3,
        images=PAN_AND_SCAN,
        chat_template=published("gemma3"),
        job={"image": {"fit": "crops", "side": 896, "patch": 14, "merge": 4, "max_tiles": 4, "resample": "bilinear"}},
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        bos="<bos>",
        eos="<eos>",
        largest=700,
    ),
    "pixtral": Model(
        processor=pixtral,
        chat_template=published("pixtral"),
        abilities=Abilities(images=True, system=False),
        job={"image": {"fit": "longest_side", "longest_side": 1024, "patch": 16, "merge": 1}},
        bos="<s>",
        eos="</s>",
        largest=1300,
        strings_from="assistant",
    ),
    "smolvlm": Model(
        processor=smolvlm,
        chat_template=smolvlm_template,
        job={"image": {"fit": "split", "side": 256, "longest_side": 1024, "patch": 16, "merge": 4, "resample": "lanczos"}},
        eos="<end_of_utterance>",
        parts_only=True,
    ),
    "llava-onevision": Model(
        processor=llava_onevision,
        chat_template=published("llava_onevision"),
        job={"image": {"fit": "anyres", "side": 384, "patch": 14, "merge": 1}, "text": {"max_tokens": 65536}},
        named={"image_token": "<image>"},
        largest=1500,
        parts_only=True,
        nested=True,
    ),
    "llava-onevision, as in its folder": Model(
        template="llava-onevision",
        is_own=True,
        processor=llava_onevision,
        chat_template=published("llava_onevision_hf"),
        job={"image": {"fit": "anyres", "side": 384, "patch": 14, "merge": 1}, "text": {"max_tokens": 65536}},
        named={"image_token": "<image>"},
        parts_only=True,
        nested=True,
    ),
    "qwen2-audio": Model(
        processor=qwen2_audio,
        chat_template=qwen2_audio_template,
        abilities=Abilities(audios=True),
        job={"audio": {"frames_per_token": 4, "last_frame": "pad", "last_token": "drop", "max_seconds": 30}},
    ),
}
EVERY = pytest.mark.parametrize("name", list(MODELS))


class Compared:
    """A named template, and the model's processor with the same tokenizer."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model = MODELS[name]
        folder = folder / name
        name = self.model.template or name
        folder.mkdir()
        tokenizer = Tokenizer.from_file(str(BUNDLED))
        tokenizer.add_special_tokens(list(TEMPLATES[name].control))
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": self.model.bos, "eos_token": self.model.eos}))
        (folder / "chat_template.jinja").write_text(self.model.chat_template(), encoding="utf-8")
        job = {"name": "j", "sources": [{"path": "/x"}], **self.model.job}
        self.source = parse_spec(job).sources[0]
        text = {**job.get("text", {}), "tokenizer": str(folder / "tokenizer.json")}
        self.ours = {
            template: SampleProcessor(parse_spec(job | {"text": {**text, "template": template}}))
            for template in ("chat_template", *([] if self.model.is_own else [name]))
        }
        options = {"bos_token": self.model.bos} if self.model.bos else {}
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=self.model.eos, extra_special_tokens=self.model.named, **options
        )
        self.theirs = self.model.processor(fast, self.model.chat_template())

    def expected(self, chat: Chat, media: list[Any]) -> list[int]:
        messages, template = [self._message(message) for message in chat.messages], self.model.chat_template()
        text = self.theirs.tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        as_they_are = {"do_rescale": False, "do_normalize": False}
        given = [media] if self.model.nested else media
        images = {"images": given, "images_kwargs": as_they_are | self.model.images}
        kind = images if self.model.abilities.images else {"audio": media, "sampling_rate": 16_000}
        (ids,) = self.theirs(text=[text], add_special_tokens=False, **(kind if media else {}))["input_ids"]
        return [int(token) for token in ids]

    def rendered(self, template: str, chat: Chat, media: list[Any]) -> list[int]:
        kind = "images" if self.model.abilities.images else "audios"
        files = {str(place): _file(medium) for place, medium in enumerate(media)}
        record = Record(key="k", fields={"messages": chat.messages, kind: list(files)}, load=files.__getitem__)
        special = tuple(token for template in TEMPLATES.values() for token in template.control)  # text, here
        mapping = MappingSpec(image_placeholder="[image]", audio_placeholder="[audio]", ignore=special)
        ours = self.ours[template]
        sample = ours.load(record, self.source.model_copy(update={"mapping": mapping}))
        return ours.size(sample).sequence.input_ids.tolist()

    def media_of(self, chat: Chat, random: Random) -> list[Any]:
        """One image or recording of a random size for each that the chat has."""
        if self.model.abilities.audios:
            return [np.zeros(random.randint(800, 480_000), np.float32) for _ in chat.media_tokens]
        sides = [(random.randint(20, self.model.largest), random.randint(20, self.model.largest)) for _ in chat.media_tokens]
        return [Picture.new("RGB", size) for size in sides]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        as_string = message["role"] == self.model.strings_from or not self.model.parts_only
        if isinstance(content, str) and not as_string:
            return message | {"content": [{"type": "text", "text": content}]}
        return message


@cache
def compared(name: str, folder: Path) -> Compared:
    return Compared(name, folder)


def check_tokens(pair: Compared, number: int) -> None:
    chats, random = Chats(11, pair.model.abilities), Random(12)
    for _ in range(number):
        chat = chats.draw()
        media = pair.media_of(chat, random)
        expected = pair.expected(chat, media)
        for template in pair.ours:
            assert pair.rendered(template, chat, media) == expected, (template, chat)


@EVERY
def test_tokens_are_those_of_the_models_processor(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_tokens(compared(name, tmp_path_factory.getbasetemp()), 6)


@pytest.mark.slow
@pytest.mark.timeout(900)
@EVERY
def test_tokens_of_a_thousand_chats_are_those_of_the_models_processor(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_tokens(compared(name, tmp_path_factory.getbasetemp()), 1000)
