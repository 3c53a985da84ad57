"""The formats of LLaVA 1.5: Vicuna's conversations, with the images of a turn in front of its words.

    <s>SYSTEM USER: <image>\\nQUESTION ASSISTANT: ANSWER</s>USER: ...

LLAVA is the format that the published models were trained with (the conversation `vicuna_v1` of their code). LLAVA_HF is what
the chat template of the models converted for `transformers` gives: no default system turn, and a blank in place of the end
token, so a model trained with it does not learn to end its answers.
"""

from __future__ import annotations

from headrace.preprocessor.records.record_to_sample import Role
from headrace.preprocessor.text.media_markup import Markup
from headrace.preprocessor.text.templates.base import Frame, Template

_CONTROL = ("<s>", "</s>", "<image>")
_DOCUMENT = Frame(end="</s>")

LLAVA = Template(
    control=_CONTROL,
    roles={
        Role.SYSTEM: Frame(tail=" ", trim=True),
        Role.USER: Frame(head="USER: ", tail=" ", trim=True),
        Role.ASSISTANT: Frame(head="ASSISTANT: ", end="</s>", trim=True),
        Role.DOCUMENT: _DOCUMENT,
    },
    image=Markup(token="<image>"),
    begin="<s>",
    system=(
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    ),
    media_gap="\n",
)

LLAVA_HF = Template(
    control=_CONTROL,
    roles={
        Role.SYSTEM: Frame(tail=" "),
        Role.USER: Frame(head="USER: ", tail=" "),
        Role.ASSISTANT: Frame(head="ASSISTANT: ", tail=" "),
        Role.DOCUMENT: _DOCUMENT,
    },
    image=Markup(token="<image>"),
    begin="<s>",
    media_gap="\n",
    joint=" ",
)
