"""What a prompt template consists of: strings in which control tokens stand by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import SpecError
from headrace.preprocessor.records.record_to_sample import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What stands around the content of a turn."""

    head: str = ""
    end: str = ""
    """Directly behind the content; learnt where the content is."""
    tail: str = ""
    """Behind `end`; never learnt."""
    trim: bool = False
    """White space around the content is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A prompt format. Only the tokens in `control` are control tokens; all else is text, tokenised in one piece with what
    the turns say, as if the whole prompt were one string."""

    control: tuple[str, ...]
    roles: Mapping[Role, Frame]
    image: str
    """An image among text: its markup, in which `image_token` stands once."""
    image_token: str
    """Repeated as often as the image has tokens."""
    audio: str = ""
    """A recording, likewise. Empty: the format has no place for one."""
    audio_token: str = ""
    tokens_per_image: int | None = None
    """Where it does not depend on the image: the model reads its images by cross-attention."""
    begin: str = ""
    """The token in front of everything, which tokenizers put there themselves."""
    system: str | None = None
    """What a system turn says that is put in front of a conversation without one. None: none is put there."""
    opening: Frame | None = None
    """Frame of a system turn in front of a conversation, where it differs."""
    system_beside_images: bool = True
    """Whether a conversation with images may have a system turn in front, and gets the default one."""
    media_gap: str | None = None
    """The media of a turn are moved in front of its words, each followed by this text. None: they stay where they are."""
    joint: str = ""
    """Between pieces of text that media stood between, where they are moved."""

    def with_tokens(self, image_token: str, audio_token: str) -> Template:
        """With other placeholders, where these are not empty. Raises SpecError: a token has another meaning already."""
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
