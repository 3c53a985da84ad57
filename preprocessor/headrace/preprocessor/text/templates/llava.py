"""The formats of LLaVA, with the images of a turn in front of its words: Vicuna's conversations for LLaVA 1.5, ChatML later.

    <s>SYSTEM USER: <image>\\nQUESTION ASSISTANT: ANSWER</s>USER: ...

LLAVA is the format that the published models were trained with (the conversation `vicuna_v1` of their code). LLAVA_HF is what
the chat template of the models converted for `transformers` gives: no default system turn, and a blank in place of the end
token, so a model trained with it does not learn to end its answers. LLAVA_ONEVISION is the format that LLaVA-OneVision was
trained with, in which each image is on a line. The template in its converted folders has other white space, and no line behind
a turn: for that take the tokenizer's own (`text.template: chat_template`).
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

LLAVA_ONEVISION = Template(
    control=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"),
    roles={role: Frame(head=f"<|im_start|>{role}\n", end="<|im_end|>", tail="\n") for role in Role}
    | {Role.DOCUMENT: Frame(end="<|endoftext|>")},
    image=Markup(token="<image>"),
    media_gap="\n",
)
