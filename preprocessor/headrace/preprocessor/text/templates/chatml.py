"""ChatML, as Qwen uses it.

    <|im_start|>ROLE\\nCONTENT<|im_end|>\\n

CHATML adds no system turn and has a place for recordings. QWEN2_5_VL is the format of Qwen2.5-VL-Instruct, in which every
conversation begins with a system turn, as in QWEN2_AUDIO, that of Qwen2-Audio-Instruct, whose recordings are numbered. QWEN3_VL
is the format of Qwen3-VL, and INTERNVL that of InternVL 2.5 and 3 as converted for `transformers`, with an image on a line.
"""

from __future__ import annotations

from headrace.preprocessor.records.record_to_sample import Role
from headrace.preprocessor.text import AUDIO_PAD, CONTROL_TOKENS, IMAGE_PAD
from headrace.preprocessor.text.media_markup import Markup
from headrace.preprocessor.text.templates.base import Frame, Template

_ROLES = {role: Frame(head=f"<|im_start|>{role}\n", end="<|im_end|>", tail="\n") for role in Role}
_ROLES[Role.DOCUMENT] = Frame(end="<|endoftext|>")
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_IMAGE_CONTROL = ("<|vision_start|>", IMAGE_PAD, "<|vision_end|>")
_IMAGE = Markup(before="<|vision_start|>", token=IMAGE_PAD, behind="<|vision_end|>")
_SYSTEM = "You are a helpful assistant."

CHATML = Template(
    control=CONTROL_TOKENS,
    roles=_ROLES,
    image=_IMAGE,
    audio=Markup(before="<|audio_start|>", token=AUDIO_PAD, behind="<|audio_end|>"),
)

QWEN2_5_VL = Template(control=(*_CONTROL, *_IMAGE_CONTROL), roles=_ROLES, image=_IMAGE, system=_SYSTEM)

QWEN3_VL = Template(control=(*_CONTROL, *_IMAGE_CONTROL), roles=_ROLES, image=_IMAGE)

QWEN2_AUDIO = Template(
    control=(*_CONTROL, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    roles=_ROLES,
    audio=Markup(before="Audio {number}: <|audio_bos|>", token="<|AUDIO|>", behind="<|audio_eos|>\n"),
    system=_SYSTEM,
)

INTERNVL = Template(
    control=(*_CONTROL, "<img>", "<IMG_CONTEXT>", "</img>"),
    roles=_ROLES,
    image=Markup(before="<img>", token="<IMG_CONTEXT>", behind="</img>\n"),
)
