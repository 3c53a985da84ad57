"""The format of SmolVLM and Idefics 3, whose images are cut into tiles that are named by row and column.

<|im_start|>User:<fake_token_around_image><row_1_col_1><image>...\\nQUESTION<end_of_utterance>\\nAssistant: ANSWER...
"""

from __future__ import annotations

from headrace.preprocessor.records.record_to_sample import Role
from headrace.preprocessor.text.media_markup import Markup
from headrace.preprocessor.text.templates.base import Frame, Template

_AROUND, _END = "<fake_token_around_image>", "<end_of_utterance>"
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_ROLES = {
    role: Frame(head=f"{role.capitalize()}: ", head_before_media=f"{role.capitalize()}:", end=_END, tail="\n")
    for role in (Role.SYSTEM, Role.USER, Role.ASSISTANT)
}

SMOLVLM = Template(
    control=("<|im_start|>", _END, "<image>", _AROUND, "<global-img>", *_TILES),
    roles=_ROLES | {Role.DOCUMENT: Frame(end=_END)},
    image=Markup(
        before=f"{_AROUND}<global-img>",
        token="<image>",
        behind=_AROUND,
        tile=_AROUND + "<row_{row}_col_{column}>",
        tile_row_end="\n",
    ),
    begin="<|im_start|>",
)
