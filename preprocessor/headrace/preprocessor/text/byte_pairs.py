"""The fast codec for byte-level byte-pair tokenizers: tiktoken, where it is installed and provably gives the same ids.

Both tiktoken and the reference, `tokenizers`, cut a text by a regular expression and then join pairs of neighbouring tokens
inside each piece, leftmost first among equals. The reference joins the pairs in its list of merges, in the list's order;
tiktoken joins any two neighbours that make a known token, lowest id first. The order is the same if ids never decrease along
the list. The pairs are the same if the bytes of each token, encoded alone, give that one token: what is joined between two cuts
of a piece does not depend on what is outside them, so two neighbours that make a token are reached just as in the token alone,
where the last two neighbours can only be a listed pair. An unlisted pair is never reached. `load` checks both conditions for
every token, also for those that are not UTF-8.

The two engines of regular expressions may know different Unicode versions and dialects. So only patterns that are known here
are accepted, and only texts of characters whose classes have long been settled; anything else is left to the reference.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from itertools import accumulate
from typing import Any

import numpy as np
from tokenizers import models


def _installed() -> Any:
    try:
        return import_module("tiktoken")
    except ImportError:
        return None


_tiktoken = _installed()
NAME = f"tiktoken {version('tiktoken')}" if _tiktoken else None
"""Name and version of the codec; None if it is not installed."""

_SHORT = r"'s|'t|'re|'ve|'m|'ll|'d"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN = rf"(?i:{_SHORT})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
PATTERNS = {
    "gpt-2": rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    "qwen": _QWEN,
    "llama-3": _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
    "gpt-4o": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{_SHORT})?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{_SHORT})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",
}
"""The pre-tokenizer patterns accepted. Each matches every character of every text and never matches the empty string."""

SETTLED = (
    (0x0000, 0x024F), (0x0384, 0x038A), (0x038C, 0x038C), (0x038E, 0x03A1), (0x03A3, 0x052F),  # Latin, Greek, Cyrillic
    (0x05D0, 0x05EA), (0x0621, 0x063A), (0x0640, 0x0669),  # Hebrew, Arabic
    (0x1E00, 0x1EFF), (0x2000, 0x2064), (0x20A0, 0x20BF), (0x2100, 0x23FF), (0x2460, 0x2B4F),  # punctuation and symbols
    (0x3000, 0x303F), (0x3041, 0x3096), (0x3099, 0x30FF), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3),  # Chinese, Japanese, Korean
    (0xFE0F, 0xFE0F), (0xFF01, 0xFFBE), (0x1F300, 0x1F6C5), (0x1F900, 0x1F9FF),  # full width, pictures
)  # fmt: skip
"""Ranges of code points (first, last) on whose character classes both regular expression engines agree."""

_SETTLED = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in SETTLED) + "]*")
LONGEST = 1 << 16
"""Longest text accepted, in characters: tiktoken gives up after a million steps back, which a long run of blanks takes."""


class BytePairs:
    """tiktoken's codec for one tokenizer. Thread-safe; the interpreter lock is released while it encodes."""

    def __init__(self, pattern: str, ranks: dict[bytes, int], *, composed: bool) -> None:
        """`ranks` gives the id of each token's bytes; `composed` tells whether the tokenizer first brings texts into NFC."""
        self._codec = _tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._lengths = [0] * (1 + max(ranks.values()))
        for token, rank in ranks.items():
            self._lengths[rank] = len(token)
        self._composed = composed

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[range]] | None:
        """Return the token ids of `text`, and for each span of characters [start, stop) the tokens that hold any of it.

        None if the reference tokenizer must encode it. `text` must have no lone surrogates.
        """
        if not self._takes(text):
            return None
        ids: list[int] = self._codec.encode_ordinary(text)
        return ids, self._tokens_of(text, ids, spans) if spans else []

    def _takes(self, text: str) -> bool:
        if len(text) > LONGEST:
            return False
        if text.isascii():
            return True
        return bool(_SETTLED.fullmatch(text)) and (not self._composed or unicodedata.is_normalized("NFC", text))

    def _tokens_of(self, text: str, ids: list[int], spans: Sequence[tuple[int, int]]) -> list[range]:
        lengths = self._lengths
        edges = list(accumulate([lengths[token] for token in ids], initial=0))  # faster than arrays for short texts
        offsets, length = _byte_offsets(text), len(text)
        return [
            range(
                bisect_right(edges, offsets[min(start, length)], lo=1) - 1,
                bisect_left(edges, offsets[min(stop, length)], hi=len(ids)),
            )
            if start < stop
            else range(0)
            for start, stop in spans
        ]


def load(document: dict[str, Any]) -> BytePairs | None:
    """Return the fast codec of a valid tokenizer.json; None if tiktoken is not installed or might give other ids."""
    pattern = _pattern(document.get("pre_tokenizer") or {})
    normalizer = document.get("normalizer")
    if _tiktoken is None or pattern is None or normalizer not in (None, {"type": "NFC"}):
        return None
    ranks = _ranks(document["model"])
    return BytePairs(pattern, ranks, composed=normalizer is not None) if ranks else None


def _pattern(splitter: dict[str, Any]) -> str | None:
    """Return the regular expression of a pre-tokenizer; None unless it is a known one and only a byte-level step follows."""
    if _is_byte_level(splitter, use_regex=True):
        return PATTERNS["gpt-2"]
    match splitter:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel"} as last,
            ],
        } if _is_byte_level(last, use_regex=False) and pattern in PATTERNS.values():
            return pattern
    return None


def _is_byte_level(step: dict[str, Any], *, use_regex: bool) -> bool:
    return (
        step.get("type") == "ByteLevel"
        and step.get("add_prefix_space") is False
        and step.get("use_regex", True) is use_regex  # files older than the setting mean true
    )


def _ranks(model: dict[str, Any]) -> dict[bytes, int] | None:
    """Return the ids of all single bytes and all merged tokens; None if the order or the pairs joined could differ."""
    if model.get("type") != "BPE" or any(map(model.get, _VARIANTS)):
        return None
    vocab: dict[str, int] = model["vocab"]
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    made = [vocab[left + right] for left, right in merges]
    tokens = dict.fromkeys([*_BYTES, *(left + right for left, right in merges)])
    if not tokens.keys() <= vocab.keys() or not _BYTES.keys() >= set().union(*tokens) or made != sorted(made):
        return None
    ranks = {bytes(map(_BYTES.__getitem__, token)): vocab[token] for token in tokens}
    if len(set(ranks.values())) < len(ranks):
        return None
    alone = models.BPE(vocab, merges, cache_capacity=0)
    return ranks if all(len(alone.tokenize(token)) == 1 for token in tokens) else None


_VARIANTS = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
"""Settings of a BPE model that must be absent, null, empty or false for the fast codec to be used."""


def _alphabet() -> dict[str, int]:
    """Return the map from characters in a tokenizer.json to the bytes that they stand for.

    A visible character stands for its own byte; characters from U+0100 on stand for the other bytes.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTES = _alphabet()


def _byte_offsets(text: str) -> Sequence[int]:
    """Return the byte offset at which each character's UTF-8 begins, and the end of the last."""
    if text.isascii():
        return range(len(text) + 1)
    data = np.frombuffer(text.encode(), np.uint8)
    starts: list[int] = np.flatnonzero((data & 0xC0) != 0x80).tolist()
    return [*starts, len(data)]
