"""What a prompt template consists of: strings in which control tokens stand by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import SpecError
from headrace.preprocessor.records.record_to_sample import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The markup around the content of a turn."""

    head: str = ""
    end: str = ""
    """Markup directly behind the content; learnt if the content is."""
    tail: str = ""
    """Markup behind `end`; never learnt."""
    trim: bool = False
    """Whether white space around the content is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A prompt format. Only the tokens in `control` are control tokens; all other markup is text, tokenised in one piece with
    the content of the turns, as if the whole prompt were one string."""

    control: tuple[str, ...]
    roles: Mapping[Role, Frame]
    image: str
    """Markup of an image, in which `image_token` stands once."""
    image_token: str
    """Placeholder of an image, repeated as often as the image has tokens."""
    audio: str = ""
    """Markup of a recording, in which `audio_token` stands once; empty if the format has no place for one."""
    audio_token: str = ""
    tokens_per_image: int | None = None
    """Fixed number of placeholders per image, for models that read images by cross-attention; None: one per image token."""
    begin: str = ""
    """The token in front of the whole sequence, which tokenizers usually add themselves."""
    system: str | None = None
    """Text of the system turn put in front of a conversation that has none; None: no turn is put there."""
    opening: Frame | None = None
    """Frame of a system turn in front of a conversation; None: the same as for other system turns."""
    system_beside_images: bool = True
    """Whether a conversation with images may have a system turn in front, and gets the default one if it has none."""
    media_gap: str | None = None
    """Text behind each medium, for formats that move the media of a turn in front of its words; None: they stay in place."""
    joint: str = ""
    """Text put between the pieces of text around a medium that is moved in front."""

    @property
    def of_media(self) -> tuple[str, ...]:
        """The control tokens that stand for media or around them, which only data with such media need."""
        return tuple(token for token in self.control if token in self.image or token in self.audio)

    @property
    def required(self) -> tuple[str, ...]:
        """The control tokens that all data need."""
        of_media = self.of_media
        return tuple(token for token in self.control if token not in of_media)

    def with_tokens(self, image_token: str, audio_token: str) -> Template:
        """Return the template with other placeholders; an empty one stays as it is.

        Raises SpecError if a placeholder has another meaning in the template already.
        """
        if not image_token and not audio_token:
            return self
        image, audio = image_token or self.image_token, audio_token or self.audio_token
        others = tuple(token for token in self.control if token not in (self.image_token, self.audio_token))
        for kind, token, taken in (("image", image, (*others, audio)), ("audio", audio, (*others, image))):
            if token in taken:
                raise SpecError(f"text.{kind}_token: {token} has another meaning in the template; name a token of its own")
        return dataclasses.replace(
            self,
            control=(*others, image, *([audio] if audio else [])),
            image=self.image.replace(self.image_token, image),
            image_token=image,
            audio=self.audio.replace(self.audio_token, audio) if self.audio else audio,
            audio_token=audio,
        )
