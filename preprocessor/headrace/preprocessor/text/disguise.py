"""Keeps what data say apart from what a chat template writes: a control token in a rendered text is the template's alone.

A template gets words that may hold the name of a control token, or a part of one that meets its other part beside it. So the
first characters of such names are replaced, in everything that data say, by rare characters that the data do not have, one
for one. A name that still stands in the rendered text was written by the template; then the characters are put back.

Tags which a template looks for (`</think>`) and added tokens that data may write are left as they are. As a template may
look at a single character all the same, its text must be the one that it renders without all this, or the sample is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from headrace.quarantine import BadSampleError, Reason

_RARE = [*map(chr, range(0x2800, 0x2900)), *map(chr, range(0x4DC0, 0x4E00))]
"""Characters to choose from, Braille and hexagrams: like `<` they are printable, and neither letters nor white space."""


class Disguises:
    """The disguises for one template and tokenizer. Stateless and thread-safe."""

    def __init__(self, control: Iterable[str], tags: Iterable[str]) -> None:
        """`control`: names of control tokens. `tags`: strings that are shown to the template as they are, where they are safe."""
        names = sorted(control, key=len, reverse=True)
        self._firsts = sorted({name[0] for name in names})
        shown = sorted(_safe(tags, names, self._firsts), key=len, reverse=True)
        first = "[" + "".join(map(re.escape, self._firsts)) + "]" if names else "(?!)"
        hidden = f"(?={'|'.join(map(re.escape, names))}){first}" if names else "(?!)"
        others = f"(?!{'|'.join(map(re.escape, shown))}){first}" if shown else first
        self._pattern = re.compile(f"{hidden}|{others}")

    def disguise_of(self, data: Any, *, num_marks: int) -> Disguise:
        """Return the disguise for data: plain values, lists and mappings. `num_marks`: how many more characters it has to spare.

        Raises BadSampleError (encoding_error) if the data leave too few characters.
        """
        texts = list(_strings(data))
        wanted = len(self._firsts) + num_marks
        spare = list(islice((rare for rare in _RARE if not any(rare in text for text in texts)), wanted))
        if len(spare) < wanted:
            raise BadSampleError(
                Reason.ENCODING_ERROR, "the text has all of Braille and of the hexagrams, some of which are needed"
            )
        marks, stand_ins = spare[:num_marks], dict(zip(self._firsts, spare[num_marks:], strict=True))
        return Disguise(self._pattern, stand_ins, tuple(marks), needed=any(map(self._pattern.search, texts)))


class Disguise:
    """Stand-ins for the characters of one sample's words."""

    def __init__(self, pattern: re.Pattern[str], stand_ins: Mapping[str, str], marks: tuple[str, ...], *, needed: bool) -> None:
        self._pattern = pattern
        self._stand_ins = stand_ins
        self._originals = str.maketrans({stand_in: first for first, stand_in in stand_ins.items()})
        self.marks = marks
        """Characters that are neither in the data nor in the disguise."""
        self.needed = needed
        """Whether anything in the data is replaced."""

    def put_on(self, data: Any) -> Any:
        """Return the data with stand-ins in every string; the first level of keys stays."""
        if isinstance(data, str):
            return self._pattern.sub(lambda match: self._stand_ins[match[0]], data)
        if isinstance(data, Mapping):
            return {self.put_on(key): self.put_on(value) for key, value in data.items()}
        if isinstance(data, list | tuple):
            return [self.put_on(item) for item in data]
        return data

    def take_off(self, text: str) -> str:
        """Return a text with the original characters."""
        return text.translate(self._originals)


def _safe(tags: Iterable[str], names: list[str], firsts: list[str]) -> set[str]:
    """Return the ends of tags that begin like a control token and can neither be nor become a part of one."""
    ends = {tag[place:] for tag in tags for place, character in enumerate(tag) if character in firsts}
    return {end for end in ends if not any(name in end or end in name or _meet(end, name) for name in names)}


def _meet(tag: str, name: str) -> bool:
    """Whether a tag ends with the beginning of a name."""
    return any(tag.endswith(name[:size]) for size in range(1, len(name)))


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _strings(key)
            yield from _strings(value)
    elif isinstance(data, list | tuple):
        for item in data:
            yield from _strings(item)
