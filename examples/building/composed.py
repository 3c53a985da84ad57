"""Samples made for the example: questions read aloud, recordings and tones, pages with several pictures, texts without any.

Speech is read by espeak-ng, so that its wording is known exactly and nobody's voice is handed on.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
from PIL import Image

from examples.building.samples import Member, Origin, Sample, composed, drawn

Wave = npt.NDArray[np.float64]  # (samples,), in [-1, 1]

VOICES = {"en": ("en-gb", "en-us+f2", "en-gb-scotland+m3"), "de": ("de+f4",), "fr": ("fr",), "es": ("es+m3",)}
FORMATS = ("mp3", "mp3", "mp3", "flac")  # MP3 mostly: a sixth of the bytes
MP3_COMPRESSION = 0.9  # libsndfile's scale from 0 to 1
TONE_RATE = 16_000
REQUESTS = ("<audio>", "Transcribe: <audio>", "<audio>\nTranscribe the recording.")
PICTURE_SIDE = 288
PASSAGES = Path(__file__).with_name("passages.json")


def spoken_questions(charts: Sequence[Sample], count: int) -> Iterator[Sample]:
    """The smallest charts that come with one question each, the question read aloud instead of written."""
    single = [chart for chart in charts if len(chart.fields()["texts"]) == 1]
    for number, chart in enumerate(sorted(single, key=lambda chart: chart.num_bytes)[:count]):
        (turn,) = chart.fields()["texts"]
        recording = _speech(turn["user"].removeprefix("<image>\n"), "en", number)
        prompt = ("<image><audio>", "<audio>\n<image>", "<image>\nAnswer the spoken question. <audio>")[number % 3]
        fields = {
            "source": "example",
            "kind": "spoken_question",
            "images": [chart.media[0].suffix],
            "audios": [recording.suffix],
            "conversations": _turns(prompt, turn["assistant"]),
        }
        yield composed(f"spoken-{chart.key}", (*chart.media, recording), fields, chart.annotation.origins)


def transcripts() -> Iterator[Sample]:
    """The passages read aloud: the whole of every other one, the first sentence of all."""
    number = itertools.count()
    for index, passage in enumerate(_passages()):
        texts = [re.split(r"(?<=[.?;:])\s", passage["text"])[0], passage["text"]]
        for text in texts if index % 2 else texts[:1]:
            place = next(number)
            recording = _speech(text, passage["lang"], place, long=text is passage["text"])
            fields = {
                "source": "example",
                "kind": "transcript",
                "audios": [recording.suffix],
                "conversations": _turns(REQUESTS[place % 3], text),
            }
            yield composed(f"transcript-{place:03d}", [recording], fields, [drawn("transcript")])


def tones() -> Iterator[Sample]:
    """Sounds that have a name: tones, sweeps, pulses, noise."""
    for number, (name, wave) in enumerate(_waves()):
        suffix = ("flac", "mp3", "wav")[number % 3]
        recording = Member(suffix=suffix, content=_encode(wave, TONE_RATE, suffix), origins=(drawn(f"computed ({name})"),))
        fields = {
            "source": "example",
            "kind": "sound",
            "audios": [suffix],
            "conversations": _turns("<audio>\nWhat do you hear?", name.capitalize() + "."),
        }
        yield composed(f"sound-{number:03d}", [recording], fields, [drawn("label")])


def picture_pages(photos: Sequence[Sample], count: int) -> Iterator[Sample]:
    """Conversations about two to five photographs, made small."""
    labelled = [(photo, photo.fields()["texts"][0]["assistant"]) for photo in photos]
    for number in range(count):
        chosen = [labelled[(number * 5 + step * 3) % len(labelled)] for step in range(2 + number % 4)]
        media = [_small(photo.media[0], place) for place, (photo, _) in enumerate(chosen)]
        figures = "\n".join(f"Figure {place + 1}: <image>" for place in range(len(chosen)))
        turns = _turns(f"{figures}\nHow many pictures are there?", str(len(chosen)))
        for place, (_, label) in enumerate(chosen):
            turns += _turns(f"What word goes with figure {place + 1}?", f"Figure {place + 1}: {label}.")
        fields = {
            "source": "example",
            "kind": "pictures",
            "images": [member.suffix for member in media],
            "conversations": turns,
        }
        origins = dict.fromkeys(origin for photo, _ in chosen for origin in photo.annotation.origins)
        yield composed(f"pictures-{number:03d}", media, fields, tuple(origins))


def texts(charts: Sequence[Sample], count: int) -> Iterator[Sample]:
    """The passages, and charts' tables told in sentences."""
    for number, passage in enumerate(_passages()):
        fields = {"source": "example", "kind": "text", "texts": [passage["text"]]}
        yield composed(f"passage-{number:03d}", [], fields, [drawn("passage")])
    tables = ((chart, _told(chart.fields()["texts"][0]["assistant"])) for chart in charts)
    for chart, told in itertools.islice(((chart, told) for chart, told in tables if told), count):
        fields = {"source": "example", "kind": "text", "texts": [told]}
        yield composed(f"told-{chart.key}", [], fields, chart.annotation.origins)


def _told(table: str) -> str:
    """An OTSL table as sentences, one per row; empty where the text is no OTSL table."""
    head, *rows = re.sub(r"</?otsl>", "", table).split("<nl>") if table.startswith("<otsl>") else [""]
    columns = head.split("<ched>")[1:]
    sentences = []
    for row in filter(None, rows):
        name, *values = re.split("<fcel>", row.removeprefix("<rhed>"))
        sentences.append(
            f"{name}: " + ", ".join(f"{column} {value}" for column, value in zip(columns[1:], values, strict=False)) + "."
        )
    return f"{', '.join(columns[1:])} by {columns[0]}. " + " ".join(sentences) if sentences else ""


def _passages() -> list[dict[str, str]]:
    passages: list[dict[str, str]] = json.loads(PASSAGES.read_text(encoding="utf-8"))
    return passages


def _turns(user: str, assistant: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": user}, {"from": "gpt", "value": assistant}]


def _speech(text: str, lang: str, number: int, *, long: bool = False) -> Member:
    voice = VOICES[lang][number % len(VOICES[lang])]
    suffix = "mp3" if long else FORMATS[number % len(FORMATS)]
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        subprocess.run(["espeak-ng", "-v", voice, "-w", file.name, "--", text], check=True)
        wave, rate = soundfile.read(file.name)
    return Member(suffix=suffix, content=_encode(wave, rate, suffix), origins=(drawn(f"read by espeak-ng {voice}"),))


def _encode(wave: Wave, rate: int, suffix: str) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, wave, rate, format=suffix.upper(), compression_level=MP3_COMPRESSION if suffix == "mp3" else None)
    return stream.getvalue()


def _small(member: Member, place: int) -> Member:
    with Image.open(io.BytesIO(member.content)) as image:
        small = image.convert("RGB")
    small.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    suffix, options = (("jpg", {"quality": 82}), ("webp", {"quality": 80}))[place % 2]
    stream = io.BytesIO()
    small.save(stream, {"jpg": "JPEG", "webp": "WEBP"}[suffix], **options)
    origins = tuple(_reduced(origin) for origin in member.origins)
    return Member(suffix=f"{place}.{suffix}", content=stream.getvalue(), origins=origins)


def _reduced(origin: Origin) -> Origin:
    return Origin(**{**{name: getattr(origin, name) for name in Origin.__slots__}, "change": f"{origin.change}, made smaller"})


def _waves() -> Iterator[tuple[str, Wave]]:
    time = np.arange(2 * TONE_RATE) / TONE_RATE
    noise = np.random.default_rng(0).uniform(-1, 1, time.size)
    yield "a steady tone", 0.4 * np.sin(2 * np.pi * 440 * time)
    yield "a rising tone", 0.4 * np.sin(2 * np.pi * (200 * time + 300 * time**2))
    yield "a falling tone", 0.4 * np.sin(2 * np.pi * (1400 * time - 300 * time**2))
    yield "three short tones", 0.4 * np.sin(2 * np.pi * 880 * time) * ((time % 0.6 < 0.2) & (time < 1.8))
    yield (
        "a chord of three tones",
        sum((0.2 * np.sin(2 * np.pi * hertz * time) for hertz in (262, 330, 392)), np.zeros(time.size)),
    )
    yield "a tone that fades away", 0.6 * np.exp(-3 * time) * np.sin(2 * np.pi * 523 * time)
    yield "noise", 0.2 * noise
    yield "noise that grows louder", 0.1 * time * noise
    yield "silence", np.zeros(time.size)
