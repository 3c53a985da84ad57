"""What a prompt template consists of: strings in which control tokens stand by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import SpecError
from headrace.preprocessor.records.record_to_sample import Role
from headrace.preprocessor.text.media_markup import Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The markup around the content of a turn."""

    head: str = ""
    head_before_media: str | None = None
    """Markup in front of content that begins with a medium; None: `head`."""
    end: str = ""
    """Markup directly behind the content; learnt if the content is."""
    tail: str = ""
    """Markup behind `end`; never learnt."""
    trim: bool = False
    """Whether white space around the content is left out."""
    trim_pieces: bool = False
    """Whether white space around each piece of text is left out, beside media too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A prompt format. Only the tokens in `control` are control tokens; all other markup is text, tokenised in one piece with
    the content of the turns, as if the whole prompt were one string."""

    control: tuple[str, ...]
    roles: Mapping[Role, Frame]
    """The roles that the format has a place for."""
    image: Markup | None = None
    audio: Markup | None = None
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
    system_joint: str | None = None
    """Text between the words of a system turn in front and the first question, of which they are the beginning; None: a system
    turn is a turn of its own."""
    alternate: bool = False
    """Whether a user and the assistant must speak in turn, a user first."""

    @property
    def of_media(self) -> tuple[str, ...]:
        """The control tokens that stand for media or around them, which only data with such media need."""
        media = [markup for markup in (self.image, self.audio) if markup is not None]
        return tuple(token for token in self.control if any(markup.names(token) for markup in media))

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
        image, audio = _with_token(self.image, image_token), _with_token(self.audio, audio_token)
        old = [markup.token for markup in (self.image, self.audio) if markup is not None]
        others = tuple(token for token in self.control if token not in old)
        placeholders = {kind: markup.token for kind, markup in (("image", image), ("audio", audio)) if markup is not None}
        for kind, token in placeholders.items():
            if token in others or list(placeholders.values()).count(token) > 1:
                raise SpecError(f"text.{kind}_token: {token} has another meaning in the template; name a token of its own")
        return dataclasses.replace(self, control=(*others, *placeholders.values()), image=image, audio=audio)


def _with_token(markup: Markup | None, token: str) -> Markup | None:
    """Return markup with another placeholder, if one is named."""
    if not token:
        return markup
    return dataclasses.replace(markup, token=token) if markup is not None else Markup(token=token)
