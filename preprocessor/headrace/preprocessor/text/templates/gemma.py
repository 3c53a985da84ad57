"""The format of Gemma 3, whose system prompt is the beginning of the first question.

    <bos><start_of_turn>user\\nSYSTEM\\n\\nQUESTION<end_of_turn>\\n<start_of_turn>model\\nANSWER<end_of_turn>\\n

An image has a blank line around it, and 256 tokens where `image` in the job's spec has `fit: square` as published; with
`fit: crops` it has words in front of it and of its crops.
"""

from __future__ import annotations

from headrace.preprocessor.records.record_to_sample import Role
from headrace.preprocessor.text.media_markup import Markup
from headrace.preprocessor.text.templates.base import Frame, Template


def _frame(name: str) -> Frame:
    return Frame(head=f"<start_of_turn>{name}\n", end="<end_of_turn>", tail="\n", trim_pieces=True)


GEMMA3 = Template(
    control=(
        "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<image_soft_token>", "<end_of_image>",
    ),
    roles={Role.USER: _frame("user"), Role.ASSISTANT: _frame("model"), Role.DOCUMENT: Frame(end="<eos>")},
    image=Markup(
        before="\n\n<start_of_image>",
        token="<image_soft_token>",
        behind="<end_of_image>\n\n",
        before_whole="Here is the original image ",
        before_crops=" and here are some crops to help you see better ",
    ),
    begin="<bos>",
    system_joint="\n\n",
    alternate=True,
)  # fmt: skip
