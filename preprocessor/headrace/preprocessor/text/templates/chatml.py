"""ChatML, as Qwen uses it.

    <|im_start|>ROLE\\nCONTENT<|im_end|>\\n

CHATML adds no system turn and has a place for recordings. QWEN2_5_VL is the format of Qwen2.5-VL-Instruct, in which every
conversation begins with a system turn.
"""

from __future__ import annotations

from headrace.preprocessor.records.record_to_sample import Role
from headrace.preprocessor.text import AUDIO_PAD, CONTROL_TOKENS, IMAGE_PAD
from headrace.preprocessor.text.templates.base import Frame, Template

_ROLES = {role: Frame(head=f"<|im_start|>{role}\n", end="<|im_end|>", tail="\n") for role in Role}
_ROLES[Role.DOCUMENT] = Frame(end="<|endoftext|>")
_IMAGE = f"<|vision_start|>{IMAGE_PAD}<|vision_end|>"

CHATML = Template(
    control=CONTROL_TOKENS,
    roles=_ROLES,
    image=_IMAGE,
    image_token=IMAGE_PAD,
    audio=f"<|audio_start|>{AUDIO_PAD}<|audio_end|>",
    audio_token=AUDIO_PAD,
)

QWEN2_5_VL = Template(
    control=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", IMAGE_PAD, "<|vision_end|>"),
    roles=_ROLES,
    image=_IMAGE,
    image_token=IMAGE_PAD,
    system="You are a helpful assistant.",
)
