"""The formats of Llama 3 and Llama 3.2 Vision.

    <|begin_of_text|><|start_header_id|>ROLE<|end_header_id|>\\n\\nCONTENT<|eot_id|>

LLAMA3 is the format of Llama 3 Instruct, which has no images; here an image is its placeholder, repeated once per token. With a
tokenizer that lacks `<|image|>`, name one of its reserved tokens as `text.image_token`. LLAMA3_2_VISION is the format of Llama
3.2 Vision Instruct: one placeholder per image, and a system turn with the dates of its published template, but no system turn
beside images.
"""

from __future__ import annotations

from headrace.preprocessor.records.record_to_sample import Role
from headrace.preprocessor.text.media_markup import Markup
from headrace.preprocessor.text.templates.base import Frame, Template

_CONTROL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|image|>")


def _roles(*, trim: bool) -> dict[Role, Frame]:
    turns = (Role.SYSTEM, Role.USER, Role.ASSISTANT)
    frames = {role: Frame(head=_head(role), end="<|eot_id|>", trim=trim) for role in turns}
    return frames | {Role.DOCUMENT: Frame(end="<|end_of_text|>")}


def _head(role: Role) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


LLAMA3 = Template(
    control=_CONTROL,
    roles=_roles(trim=True),
    image=Markup(token="<|image|>"),
    begin="<|begin_of_text|>",
)

LLAMA3_2_VISION = Template(
    control=_CONTROL,
    roles=_roles(trim=False),
    image=Markup(token="<|image|>"),
    tokens_per_image=1,
    begin="<|begin_of_text|>",
    system="",
    opening=Frame(
        head=f"{_head(Role.SYSTEM)}Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n",
        end="<|eot_id|>",
        trim=True,
    ),
    system_beside_images=False,
)
