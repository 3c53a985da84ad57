"""The format of Pixtral, whose images have a token at the end of each row.

    <s>[INST]QUESTION[/INST]ANSWER</s>[INST]...

The published template drops a system prompt in front of a conversation that ends with an answer, so there is no place for one.
"""

from __future__ import annotations

from headrace.preprocessor.records.record_to_sample import Role
from headrace.preprocessor.text.media_markup import Markup
from headrace.preprocessor.text.templates.base import Frame, Template

PIXTRAL = Template(
    control=("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    roles={
        Role.USER: Frame(head="[INST]", tail="[/INST]"),
        Role.ASSISTANT: Frame(end="</s>"),
        Role.DOCUMENT: Frame(end="</s>"),
    },
    image=Markup(token="[IMG]", row_break="[IMG_BREAK]", behind="[IMG_END]"),
    begin="<s>",
    alternate=True,
)
