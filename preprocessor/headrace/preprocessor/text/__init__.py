"""Text to token ids with any `tokenizer.json` of the `tokenizers` library.

A control token's name inside text is encoded as ordinary tokens, and so is the name of any token that the file calls special.
Control ids come from the template only. Added tokens that are not special, such as `<think>` and `<tool_call>` of Qwen3, are
part of what is written: they are kept whole, as in `transformers`, and so are special ones that the job allows. Encoding is
thread-safe but does not run in parallel between Python threads.
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.decoders import DecodeStream

from headrace.errors import DatasetError, SpecError
from headrace.observability.logs import pairs
from headrace.preprocessor.sources.blob import read_url
from headrace.preprocessor.text import byte_pairs
from headrace.quarantine import BadSampleError, Reason

log = logging.getLogger(__name__)

MAX_TOKENIZER_BYTES = 128 * 2**20  # the largest in use are 35 MB
BUNDLED = Path(__file__).with_name("tokenizer.json")

IMAGE_PAD, AUDIO_PAD = "<|image_pad|>", "<|audio_pad|>"
CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", IMAGE_PAD, "<|vision_end|>",
    "<|audio_start|>", AUDIO_PAD, "<|audio_end|>",
)  # fmt: skip
"""Control tokens of the bundled tokenizer."""


class TextEncoder:
    """A tokenizer that never encodes text to a control id."""

    def __init__(
        self,
        definition: str,
        name: str,
        control: Sequence[str] = CONTROL_TOKENS,
        *,
        optional: Sequence[str] = (),
        allowed: Sequence[str] = (),
        every_special: bool = False,
    ) -> None:
        """`definition` is the content of a tokenizer.json, `name` what errors call it.

        `optional` are control tokens that the file may lack, and with `every_special` all its special tokens are control tokens.
        `allowed` are special tokens whose names in a text are the tokens themselves. Raises SpecError if it is not a
        tokenizer.json, lacks a control or an allowed token, or cannot tell a control token from text.
        """
        self.name = name
        """What errors call the tokenizer."""
        document, self._tokenizer, control = _load(definition, name, (*control, *optional), allowed, every_special=every_special)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        for token in (*(token for token in control if token not in optional), *allowed):
            if token not in vocabulary:
                kind = "allowed token" if token in allowed else "control token"
                raise SpecError(f"text.tokenizer: {name} lacks the {kind} {token}; add it to its added tokens")
        control = tuple(token for token in control if token in vocabulary)
        self.vocab_size = 1 + max(vocabulary.values())
        """One more than the highest token id."""
        self.control: Mapping[str, int] = {token: vocabulary[token] for token in control}
        """Id of each control token by its name, without the optional ones that the file lacks."""
        self.added_tokens: Mapping[str, AddedToken] = {
            token.content: token for token in self._tokenizer.get_added_tokens_decoder().values()
        }
        """Added tokens by their names, special or not."""
        special = {token["content"] for token in document["added_tokens"] if token["special"]}
        self.disarmed = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        """Finds the names of special tokens in a text, which are text there."""
        self.longest = max(map(len, vocabulary))
        """Number of characters of the longest token."""
        self._byte_pairs = byte_pairs.load(document)
        kept = [re.escape(token["content"]) for token in document["added_tokens"] if not token["special"]]
        self._kept = re.compile("|".join(kept)) if kept else None  # added tokens that the fast codec does not know
        self._inner = _inner(document) or self._tokenizer
        for token in control:
            if vocabulary[token] in self._tokenizer.encode(token, add_special_tokens=False).ids:
                raise SpecError(f"text.tokenizer: {name} cannot tell {token} in a text from the control token")

    @property
    def codec(self) -> str:
        """The library that encodes ordinary text, with its version."""
        return byte_pairs.NAME if self._byte_pairs and byte_pairs.NAME else f"tokenizers {version('tokenizers')}"

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Return the token ids of `text`, with nothing added.

        With a `limit`, text that must have more tokens than that is refused before it is tokenised, which bounds the time.
        Raises BadSampleError with encoding_error (a lone surrogate) or too_long.
        """
        ids, _ = self.encode_spans(text, (), limit)
        return ids

    def encode_spans(
        self, text: str, spans: Sequence[tuple[int, int]], limit: int | None = None, *, inner: bool = False
    ) -> tuple[list[int], list[range]]:
        """Return the token ids of `text`, and for each span of characters [start, stop) the tokens that hold any of it.

        `inner`: whether `text` stands behind a control token, where some tokenizers mark no beginning of a word. `limit`: text
        that must have more tokens is refused before it is tokenised. Raises BadSampleError with encoding_error (a lone
        surrogate) or too_long.
        """
        if limit is not None and len(text) > limit * self.longest:
            raise BadSampleError(Reason.TOO_LONG, f"{len(text)} characters have more than {limit} tokens")
        try:
            text.encode()
        except UnicodeEncodeError as err:
            raise BadSampleError(Reason.ENCODING_ERROR, f"{text[err.start]!r} has no UTF-8 form") from err
        if self._byte_pairs and not (self._kept and self._kept.search(text)):
            fast = self._byte_pairs.encode_spans(text, spans)
            if fast:
                return fast
        encoding = (self._inner if inner else self._tokenizer).encode(text, add_special_tokens=False)
        return encoding.ids, [_tokens_of(encoding, start, stop) for start, stop in spans]

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, with control tokens by name."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def pieces(self, ids: Sequence[int]) -> list[tuple[str, int]]:
        """Cut `ids` into (text, number of tokens): one token each, except for characters that several tokens share."""
        stream = DecodeStream(skip_special_tokens=False)
        pieces: list[tuple[str, int]] = []
        pending = 0
        for token in ids:
            pending += 1
            text = stream.step(self._tokenizer, token)
            if text is not None:
                pieces.append((text, pending))
                pending = 0
        return [*pieces, ("\ufffd", pending)] if pending else pieces


@lru_cache(maxsize=4)
def load_encoder(
    path: str,
    control: tuple[str, ...] = CONTROL_TOKENS,
    optional: tuple[str, ...] = (),
    allowed: tuple[str, ...] = (),
    *,
    every_special: bool = False,
) -> TextEncoder:
    """Load, or take from a cache, the encoder at a path or fsspec URL; the bundled one for "". TextEncoder says the rest.

    Raises SpecError.
    """
    name = path or str(BUNDLED)
    try:
        definition = (read_url(path, MAX_TOKENIZER_BYTES) if path else BUNDLED.read_bytes()).decode()
    except DatasetError as err:
        raise SpecError(f"text.tokenizer: {err}") from err
    except UnicodeDecodeError as err:
        raise SpecError(f"text.tokenizer: {name} is not UTF-8: {err}") from err
    encoder = TextEncoder(definition, name, control, optional=optional, allowed=allowed, every_special=every_special)
    log.info("text codec %s", pairs(tokenizer=path or "bundled", codec=encoder.codec))
    if byte_pairs.NAME is None:
        log.warning("tiktoken is not installed: tokenizers encodes text, with the same ids; pip install tiktoken is faster")
    return encoder


def _load(
    definition: str, name: str, control: Sequence[str], allowed: Sequence[str], *, every_special: bool
) -> tuple[dict[str, Any], Tokenizer, tuple[str, ...]]:
    """Parse a tokenizer.json, and mark just the tokens special whose names are to be text in a text; return all control tokens.

    `encode_special_tokens` turns those into text. The post-processor is removed, since it would add tokens and cut blanks off
    their spans.
    """
    for token in allowed:
        if token in control:
            raise SpecError(f"text.allow_tokens: {token} is a control token of the template, which data must not write")
    try:
        document = json.loads(definition)
        for token in document["added_tokens"]:
            token["special"] = (token["special"] and token["content"] not in allowed) or token["content"] in control
        if every_special:
            unknown = document["model"].get("unk_token")  # what texts become that have no other token
            special = [token["content"] for token in document["added_tokens"] if token["special"]]
            control = tuple(dict.fromkeys([*control, *(token for token in special if token != unknown)]))
        document["post_processor"] = None
        return document, _tokenizer(document), tuple(control)
    except Exception as err:  # `tokenizers` raises Exception itself
        raise SpecError(f"text.tokenizer: {name} is not a tokenizer.json: {err}") from err


def _tokenizer(document: dict[str, Any]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _inner(document: dict[str, Any]) -> Tokenizer | None:
    """Return the tokenizer for text behind a control token; None if that makes no difference.

    SentencePiece's "▁" in front of the first word is put there by the pre-tokenizer `Metaspace` with the scheme `first`.
    """
    splitter = document.get("pre_tokenizer") or {}
    first = [
        step
        for step in (splitter, *splitter.get("pretokenizers", ()))
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"
    ]
    for step in first:
        step["prepend_scheme"] = "never"
    return _tokenizer(document) if first else None


def _tokens_of(encoding: Encoding, start: int, stop: int) -> range:
    """Return the tokens that hold any of the characters [start, stop), by bisection, as tokens are in the order of the text."""

    if start == stop:
        return range(0)

    def span(token: int) -> tuple[int, int]:
        return encoding.token_to_chars(token) or (0, 0)  # all have a span: only tokens added by a post-processor have none

    tokens = range(len(encoding.ids))
    return range(
        bisect_right(tokens, start, key=lambda token: span(token)[1]),
        bisect_left(tokens, stop, key=lambda token: span(token)[0]),
    )
