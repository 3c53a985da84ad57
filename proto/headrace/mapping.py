"""The mapping of a source: which keys of a record (tar sample, Parquet row, JSON line) make up a sample."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Roles = Annotated[tuple[str, ...], Field(min_length=1)]
Placeholder = Annotated[str, Field(min_length=1)]


class MappingSpec(BaseModel):
    """Which keys of a record hold its text, images and recordings. By default the usual keys are tried, so that common layouts
    need no mapping at all."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    text: str | None = None
    """Key of the text: a plain caption, an interleaved list of strings, or a list of turns. None: the first that the record has
    of `texts`, `conversations`, `messages`, `caption`, `text`, `txt`."""
    images: str | None = None
    """Key of the image or images. None: the first that the record has of `images`, `image`, else the tar members with the
    extension of an image, in natural order."""
    audios: str | None = None
    """Key of the recording or recordings. None: the first that the record has of `audios`, `audio`, else the tar members with the
    extension of a recording, in natural order."""
    ignore: tuple[str, ...] = ()
    """Content to leave out, for which a sample would otherwise be refused: media, by their key or by the extension of their tar
    member (`mp4`, or `seg.png` for just those), other frameworks' placeholders, which are plain text here (`<video>`), and
    fields of a conversation that no template uses (`tool_calls`)."""
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
