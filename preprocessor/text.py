"""Text to token ids with any `tokenizer.json` of the `tokenizers` library.

Text is text: the name of a control token inside of it is cut into ordinary tokens, whatever the file says of its added
tokens. Control ids come from the template only. Encoding is thread-safe but does not run in parallel between Python threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import fsspec
from tokenizers import Tokenizer

from headrace.errors import SpecError
from headrace.quarantine import BadSampleError, Reason

BUNDLED = Path(__file__).with_name("tokenizer.json")

END_OF_TEXT = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
IMAGE_START, IMAGE_PAD, IMAGE_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
AUDIO_START, AUDIO_PAD, AUDIO_END = "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"
CONTROL_TOKENS = (
    END_OF_TEXT, TURN_START, TURN_END, IMAGE_START, IMAGE_PAD, IMAGE_END, AUDIO_START, AUDIO_PAD, AUDIO_END
)  # fmt: skip


class TextEncoder:
    """A tokenizer that never gives a control id for text."""

    def __init__(self, definition: str, name: str) -> None:
        """`definition` is the content of a tokenizer.json, `name` what errors call it. Raises SpecError."""
        self._tokenizer = _load(definition, name)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        missing = [token for token in CONTROL_TOKENS if token not in vocabulary]
        if missing:
            raise SpecError(f"text.tokenizer: {name} lacks the control token {missing[0]}; add it to its added tokens")
        self.vocab_size = 1 + max(vocabulary.values())
        """Token ids are below this."""
        self.control: Mapping[str, int] = {token: vocabulary[token] for token in CONTROL_TOKENS}
        """Id of each of CONTROL_TOKENS."""
        self._longest = max(map(len, vocabulary))
        for token in CONTROL_TOKENS:
            if vocabulary[token] in self._tokenizer.encode(token, add_special_tokens=False).ids:
                raise SpecError(f"text.tokenizer: {name} cannot tell {token} in a text from the control token")

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Token ids of `text`, nothing added.

        With a `limit`, text that must have more tokens than that is refused before it is tokenised, so that time is bounded.
        Raises BadSampleError with encoding_error (a lone surrogate) or too_long.
        """
        if limit is not None and len(text) > limit * self._longest:
            raise BadSampleError(Reason.TOO_LONG, f"{len(text)} characters have more than {limit} tokens")
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise BadSampleError(Reason.ENCODING_ERROR, f"{text[err.start]!r} has no UTF-8 form") from err
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, control tokens by name."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


@lru_cache(maxsize=4)
def load_encoder(path: str) -> TextEncoder:
    """The encoder at a path or fsspec URL; the bundled one for "". Raises SpecError."""
    name = path or str(BUNDLED)
    try:
        with fsspec.open(name, "rb") as file:
            definition = file.read().decode()
    except (OSError, ImportError, ValueError) as err:
        raise SpecError(f"text.tokenizer: cannot read {name}: {err}") from err
    return TextEncoder(definition, name)


def _load(definition: str, name: str) -> Tokenizer:
    """The tokenizer with every added token marked special, which is what `encode_special_tokens` turns into text."""
    try:
        document = json.loads(definition)
        for token in document["added_tokens"]:
            token["special"] = True
        tokenizer = Tokenizer.from_str(json.dumps(document))
    except Exception as err:  # `tokenizers` raises Exception itself
        raise SpecError(f"text.tokenizer: {name} is not a tokenizer.json: {err}") from err
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
