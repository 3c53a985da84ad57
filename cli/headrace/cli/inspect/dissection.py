"""Preprocessing of one sample piece by piece, with a report of what each piece found or why it refused the sample.

The pieces are the pipeline's own, in its order: read, map, look into the headers, make the tokens, decode. The verdict and the
reason for a refusal are therefore those of a preprocessor.
"""

from __future__ import annotations

import io
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import soundfile
from PIL import Image as Pillow

from headrace.anyres import image_of_sample
from headrace.cli.inspect.preview import tokens_of
from headrace.errors import DatasetError
from headrace.preprocessor import audio, image
from headrace.preprocessor.decoding import SampleProcessor
from headrace.preprocessor.image import header
from headrace.preprocessor.records.record_to_sample import Audio, Image, Sample, Segment, Text
from headrace.preprocessor.sources import Shard
from headrace.preprocessor.text.sequence import TokenSequence
from headrace.preprocessor.text.template import load_template
from headrace.quarantine import BadSampleError, Reason, Rejected
from headrace.source_spec import SourceSpec
from headrace.spec import JobSpec

_T = TypeVar("_T")
MAX_TEXT = 200  # characters kept of a field or a segment


def dissect(spec: JobSpec, shard: Shard, row: int, source: SourceSpec) -> dict[str, Any]:
    """Preprocess a sample up to the first piece that refuses it, and return what was found, in its public JSON form.

    pieces       {piece, ms} of the pieces that ran, in order; ms is the wall time
    fields       {name, kind, size, value} of each field of the record
    members      the names of the record's media (tar shards only)
    turns        {role, loss, segments: {kind, size, text}}
    media        {medium, bytes, format, codec, ...}; an image also has size_px, mode, orientation and patches, a recording
                 rate_hz, channels, seconds and mel_frames; both have the tokens they become and the array they decode to,
                 null where too_long has cut them away
    tokens       {count, with_loss, disarmed, truncated, text}; truncated: whether too_long has cut the sample;
                 disarmed: names of special tokens that are text in the sample's words;
                 text is [[piece, whether it carries loss], ...]; null if no tokens were made
    refusal      {piece, reason, detail, traceback}; null where the sample is good

    Raises DatasetError, OSError or MemoryError where the sample cannot be read on this machine, SpecError where the tokenizer
    does not fit.
    """
    dissection = _Dissection(spec)
    try:
        dissection.run(shard, row, source)
    except BadSampleError as err:
        dissection.refuse(err.reason, err.detail, err)
    except (DatasetError, OSError, MemoryError):
        raise
    except Exception as err:  # a preprocessor would refuse the sample too
        dissection.refuse(Reason.CORRUPT_MEDIA, f"unexpected {type(err).__name__}: {err}", err)
    return dissection.report


def refusal_of(damage: Rejected) -> dict[str, Any]:
    """Return a report in the form of `dissect` for a sample refused when its shard was indexed: only its refusal is known."""
    refusal = {"piece": "index the shard", "reason": str(damage.reason), "detail": damage.detail, "traceback": None}
    return {**_nothing(), "refusal": refusal}


def _nothing() -> dict[str, Any]:
    return {"pieces": [], "fields": [], "members": [], "turns": [], "media": [], "tokens": None, "refusal": None}


class _Dissection:
    """The preprocessing of one sample, which adds what it finds to `report` piece by piece."""

    def __init__(self, spec: JobSpec) -> None:
        self.report = _nothing()
        self._spec = spec
        self._image = spec.image
        self._processor = SampleProcessor(spec)
        self._piece = ""

    def run(self, shard: Shard, row: int, source: SourceSpec) -> None:
        """Run all pieces. Raises BadSampleError, and whatever else reading and decoding raise."""
        record = self._timed("read the record", lambda: shard.read(row))
        self.report["fields"] = [_field(name, value) for name, value in record.fields.items()]
        self.report["members"] = list(record.members)
        loaded = self._timed("map its fields and load its media", lambda: self._processor.load(record, source))
        sample = loaded.sample
        self._image = image_of_sample(self._spec.image, len(loaded.images))
        self.report["turns"] = _turns(sample)
        media = [segment for segment in sample.segments if not isinstance(segment, Text)]
        names = [_name_of_last(media[: number + 1]) for number in range(len(media))]
        for name, medium in zip(names, media, strict=True):
            self.report["media"].append({"medium": name, "bytes": len(medium.data), **_header(medium)})
        for name, medium, about in self._by_kind(names, media):
            about |= self._timed(f"look into the header of {name}", partial(self._sizes, medium))
        sizes = self._timed("make the tokens", lambda: self._processor.size(loaded))
        self.report["tokens"] = self._tokens(sizes.sequence)
        kept = {kind: set(which) for kind, which in ((Image, sizes.sequence.images), (Audio, sizes.recordings))}
        numbers = Counter[type]()
        for name, medium, about in self._by_kind(names, media):
            numbers[type(medium)] += 1
            if numbers[type(medium)] - 1 not in kept[type(medium)]:
                about["decoded"] = None
                continue
            self._piece = f"decode {name}"
            self._decode(medium)  # warm up: the first call compiles code and makes filters, which must not be timed
            about["decoded"] = self._timed(self._piece, partial(self._decode, medium))

    def refuse(self, reason: Reason, detail: str, error: Exception) -> None:
        self.report["refusal"] = {
            "piece": self._piece,
            "reason": str(reason),
            "detail": detail,
            "traceback": "".join(traceback.format_exception(error)),
        }

    def _by_kind(self, names: list[str], media: list[Image | Audio]) -> list[tuple[str, Image | Audio, dict[str, Any]]]:
        """Return names, media and their reports in the pipeline's order: images before recordings."""
        return sorted(zip(names, media, self.report["media"], strict=True), key=lambda item: isinstance(item[1], Audio))

    def _timed(self, piece: str, work: Callable[[], _T]) -> _T:
        self._piece = piece
        begin_s = time.perf_counter()
        try:
            return work()
        finally:
            self.report["pieces"].append({"piece": piece, "ms": (time.perf_counter() - begin_s) * 1e3})

    def _sizes(self, medium: Image | Audio) -> dict[str, Any]:
        """Return the patches or mel frames of a medium and its number of tokens, from its header. Raises BadSampleError."""
        if isinstance(medium, Image):
            grid = image.probe(medium.data, self._image)
            return {"patches": [grid.height, grid.width], "tiles": grid.tiles, "tokens": grid.tokens(self._image.merge)}
        frames = audio.probe(medium.data, self._spec.audio)
        pieces = audio.frames_of_pieces(frames, self._spec.audio)
        return {"mel_frames": frames, "tokens": sum(self._spec.audio.num_tokens(piece) for piece in pieces)}

    def _decode(self, medium: Image | Audio) -> str:
        """Decode a medium and return the shape and dtype of the array as text. Raises BadSampleError."""
        if isinstance(medium, Image):
            array, _ = image.decode(medium.data, self._image)
            return f"{' x '.join(map(str, array.shape))} {array.dtype}"
        mel = audio.decode(medium.data, self._spec.audio)
        return f"{' x '.join(map(str, mel.shape))} {mel.dtype}"

    def _tokens(self, sequence: TokenSequence) -> dict[str, Any]:
        template = load_template(self._spec.text)
        shown = [[token.text, token.learnt] for token in tokens_of(sequence.input_ids, sequence.labels, template)]
        about = {"count": len(sequence.input_ids), "with_loss": sequence.num_targets, "disarmed": sequence.num_disarmed}
        about["truncated"] = sequence.is_truncated
        return {**about, "text": shown}


def _name_of_last(media: list[Image | Audio]) -> str:
    """Count the last medium by its kind, such as `image 2`."""
    kind = type(media[-1])
    return f"{'image' if kind is Image else 'recording'} {sum(type(medium) is kind for medium in media)}"


def _field(name: str, value: Any) -> dict[str, Any]:
    """Return a field's kind, its size (characters, bytes or items; null for numbers) and the beginning of its value."""
    size = len(value) if isinstance(value, str | bytes | list | dict) else None
    shown = f"{value[:16]!r}..." if isinstance(value, bytes) else str(value)
    return {"name": name, "kind": type(value).__name__, "size": size, "value": shown[:MAX_TEXT]}


def _turns(sample: Sample) -> list[dict[str, Any]]:
    return [
        {"role": str(turn.role), "loss": turn.loss, "segments": [_segment(segment) for segment in turn.segments]}
        for turn in sample.turns
    ]


def _segment(segment: Segment) -> dict[str, Any]:
    if isinstance(segment, Text):
        return {"kind": "text", "size": len(segment.text), "text": segment.text[:MAX_TEXT]}
    return {"kind": "image" if isinstance(segment, Image) else "recording", "size": len(segment.data), "text": None}


def _header(medium: Image | Audio) -> dict[str, Any]:
    """Return what a file's header says, as far as it can be read, whether or not the pipeline accepts the file."""
    return _image_header(medium.data) if isinstance(medium, Image) else _recording_header(medium.data)


def _image_header(data: bytes) -> dict[str, Any]:
    try:
        with Pillow.open(io.BytesIO(data)) as file:
            about = {"format": file.format, "mode": file.mode, "size_px": list(file.size)}
    except Exception as err:  # Pillow raises errors of many types for damaged bytes
        return {"format": None, "codec": None, "starts_with": data[:16].hex(" "), "error": f"{type(err).__name__}: {err}"}
    parsed = header.parse(data)
    codec = image.codecs()["jpeg" if parsed is not None and parsed.plain_jpeg else "other"]
    return {**about, "orientation": parsed.orientation if parsed else None, "codec": codec}


def _recording_header(data: bytes) -> dict[str, Any]:
    try:
        about = soundfile.info(io.BytesIO(data))
    except Exception as err:  # soundfile raises errors of several types too
        return {"format": None, "codec": None, "starts_with": data[:16].hex(" "), "error": f"{type(err).__name__}: {err}"}
    found = {"format": about.format, "codec": about.subtype, "rate_hz": about.samplerate, "channels": about.channels}
    return {**found, "seconds": about.frames / about.samplerate if about.samplerate else None}
