"""How a record (tar sample, Parquet row, JSON line) becomes a sample: the declarative part of a source."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Roles = Annotated[tuple[str, ...], Field(min_length=1)]
Placeholder = Annotated[str, Field(min_length=1)]


class MappingSpec(BaseModel):
    """Which keys of a record hold what. Every default is looked for, so that usual layouts need no mapping at all."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    text: str | None = None
    """Key of the text: a plain caption, an interleaved list of strings, or a list of turns. None: the first of
    `texts`, `conversations`, `messages`, `caption`, `text`, `txt` that is there."""
    images: str | None = None
    """Key of the image or images. None: the first of `images`, `image` that is there, else the tar members with the
    extension of an image, in natural order."""
    audios: str | None = None
    """Key of the recording or recordings. None: the first of `audios`, `audio` that is there, else the tar members with
    the extension of a recording, in natural order."""
    ignore: tuple[str, ...] = ()
    """What to train without, and a sample is refused for otherwise: media by their key or by the extension of their tar member
    (`mp4`, or `seg.png` for just those), other trainers' placeholders that are text here (`<video>`), and fields of a
    conversation that no template has a place for (`tool_calls`)."""
    user_roles: Roles = ("user", "human")
    assistant_roles: Roles = ("assistant", "gpt", "model")
    system_roles: tuple[str, ...] = ("system",)
    image_placeholder: Placeholder = "<image>"
    audio_placeholder: Placeholder = "<audio>"


MAPPING_PRESETS: dict[str, MappingSpec] = {
    "auto": MappingSpec(),
    "caption": MappingSpec(text="txt"),  # KEY.jpg beside KEY.txt, as img2dataset writes them
    "cauldron": MappingSpec(text="texts", images="images"),
    "llava": MappingSpec(text="conversations", images="image"),
    "messages": MappingSpec(text="messages"),
}
