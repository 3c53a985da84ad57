"""Samples in a form into which every library's samples can be brought.

A sample is a list of turns, a turn a list [role, parts] or, if it is an answer that must not be learnt, [role, parts, false]. A
part is a text or a digest of a medium: {"image": "bytes:SHA"} of an encoded file, {"image": "pixels:WxH:SHA"} of RGB pixels
where a reader only gives these. A caption or document is one turn with the role "document".
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image

Part = str | dict[str, str]
Turn = list[Any]
Sample = list[Turn]


def image(value: Any) -> Part:
    """Return the digest of a picture: encoded bytes, a PIL image, or an array or tensor of (H, W), (H, W, C) or (C, H, W)."""
    return {"image": digest(value)}


def audio(value: bytes) -> Part:
    """Return the digest of a recording, from the bytes of its file."""
    return {"audio": digest(value)}


def other(kind: str, value: Any) -> Part:
    """Return the digest of a medium that Headrace has no place for, such as a film: no reading of it can equal this."""
    return {kind: digest(value) if isinstance(value, bytes) else "unread"}


def digest(value: Any) -> str:
    """Return what tells one medium from another; see the module."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes:{_sha(bytes(value))}"
    if isinstance(value, Image.Image):
        return _pixels(value)
    array = np.asarray(value)
    if array.dtype.kind == "f":
        array = np.rint(array * 255)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (3, 4):
        array = array.transpose(1, 2, 0)
    return _pixels(Image.fromarray(np.squeeze(array).astype(np.uint8)))


def digests(data: bytes) -> set[str]:
    """Return all digests that an encoded picture or recording may have."""
    found = {digest(data)}
    try:
        with Image.open(io.BytesIO(data)) as picture:
            found.add(_pixels(picture))
    except OSError:
        return found  # not a picture
    return found


def _pixels(picture: Image.Image) -> str:
    rgb = picture.convert("RGB")
    return f"pixels:{rgb.width}x{rgb.height}:{_sha(rgb.tobytes())}"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def document(*parts: Part) -> Sample:
    """Return a caption or an interleaved document as a sample."""
    return [["document", joined(parts)]]


def turn(role: str, *parts: Part, learnt: bool = True) -> Turn:
    """Return one turn."""
    return [role, joined(parts)] if learnt else [role, joined(parts), False]


def dialogue(question: Sequence[Part], answer: str) -> Sample:
    """Return one question, of several parts, and its answer."""
    return [turn("user", *question), turn("assistant", answer)]


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return the parts, with texts that follow each other as one, and without empty ones."""
    result: list[Part] = []
    for part in parts:
        if isinstance(part, str) and result and isinstance(result[-1], str):
            result[-1] += part
        elif part != "":
            result.append(part)
    return result


def filled(text: str, *media: Part, placeholder: str = r"<image>|<audio>") -> list[Part]:
    """Return a text with its placeholders replaced by the media, in order. Raises ValueError if their numbers differ."""
    waiting = iter(media)
    pieces = re.split(f"({placeholder})", text)
    parts = [next(waiting) if re.fullmatch(placeholder, piece) else piece for piece in pieces]
    if list(waiting):
        raise ValueError(f"{text!r} has fewer placeholders than media")
    return joined(parts)


def conversation(turns: Iterable[tuple[str, str]], *media: Part) -> Sample:
    """Return turns (role, text) whose placeholders stand for the media, in order."""
    waiting = list(media)
    sample = []
    for role, text in turns:
        count = len(re.findall(r"<image>|<audio>", text))
        taken, waiting = waiting[:count], waiting[count:]
        sample.append(turn({"human": "user", "gpt": "assistant"}.get(role, role), *filled(text, *taken)))
    if waiting:
        raise ValueError(f"{len(waiting)} media have no placeholder")
    return sample


def as_lines(samples: Iterable[Sample]) -> list[str]:
    """Return each sample as JSON, sorted: two data sets are equal if these are, whatever order their samples come in."""
    return sorted(json.dumps(sample, sort_keys=True) for sample in samples)
