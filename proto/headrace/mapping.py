"""The mapping of a source: which keys of a record (tar sample, Parquet row, JSON line) make up a sample."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Roles = Annotated[tuple[str, ...], Field(min_length=1)]
Path = Annotated[str, Field(max_length=512)]
Placeholder = Annotated[str, Field(min_length=1)]


class MappingSpec(BaseModel):
    """Which keys of a record hold its text, images and recordings. By default the usual keys are tried, so that common layouts
    need no mapping at all."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    text: Path | None = None
    """Path of the text: a plain caption, an interleaved list of strings, or a list of turns. None: the first that the record has
    of `texts`, `conversations`, `messages`, `caption`, `text`, `txt`, or else a question and its answer.

    A path is a key, or keys and places in lists with dots between them (`json.caption`, `caption.0`), where `*` is every item of
    a list (`parts.*.image`). A key that has dots itself is found too."""
    question: Path | None = None
    """Path of the question that a user asks, where it and its answer are in fields of their own; comes with `answer`. None: the
    one of `question`, `query`, `prompt`, `instruction`, `problem` that the record has, if it has no `text`."""
    answer: Path | None = None
    """Path of the answer to `question`. None: the one of `answer`, `answers`, `response`, `completion`, `output`, `solution`."""
    images: Path | None = None
    """Path of the image or images. None: the first that the record has of `images`, `image`, else the tar members with the
    extension of an image, in natural order."""
    audios: Path | None = None
    """Path of the recording or recordings. None: the first that the record has of `audios`, `audio`, else the tar members with
    the extension of a recording, in natural order."""
    ignore: tuple[str, ...] = ()
    """Content to leave out, for which a sample would otherwise be refused: media, by their key or by the extension of their tar
    member (`mp4`, or `seg.png` for just those), other frameworks' placeholders, which are plain text here (`<video>`), and
    fields of a conversation that no template uses (`tool_calls`). A key that is listed here is not looked for either."""
    learn: Literal["all", "last"] = "all"
    """Which answers of a conversation are learnt: all of them, or the last one, to which the others are context."""
    thinking: Literal["keep", "drop", "mask"] | None = None
    """What becomes of thoughts, between `<think>` and `</think>` in answers or in a field beside them (`reasoning_content`): they
    are learnt, left out, or there without being learnt. None: `<think>` is text like any other, and the field is refused."""
    weights: bool = False
    """Whether the `weight` of an answer, or its `loss_weight`, may be another number than 0 and 1: by how much the loss of its
    tokens counts (`PackedMicrobatch.target_weights`)."""
    user_roles: Roles = ("user", "human")
    """What the turns of the user of a conversation are called."""
    assistant_roles: Roles = ("assistant", "gpt", "model")
    """What the turns that answer are called."""
    system_roles: tuple[str, ...] = ("system",)
    """What the turns that instruct the model are called."""
    image_placeholder: Placeholder = "<image>"
    """What stands in a text where an image is."""
    audio_placeholder: Placeholder = "<audio>"
    """What stands in a text where a recording is."""

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.question is None) != (self.answer is None):
            raise ValueError("question and answer are named together, or neither is")
        if self.text is not None and self.question is not None:
            raise ValueError("names text, or question and answer, not both")
        return self


MAPPING_PRESETS: dict[str, MappingSpec] = {
    "auto": MappingSpec(),
    "caption": MappingSpec(text="txt"),  # KEY.jpg beside KEY.txt, as img2dataset writes them
    "cauldron": MappingSpec(text="texts", images="images"),
    "llava": MappingSpec(text="conversations", images="image"),
    "messages": MappingSpec(text="messages"),
}
