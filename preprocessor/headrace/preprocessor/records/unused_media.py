"""Checks that the mapping takes all media in a record, or ignores them by name.

A sample without its video or its mask is another sample, and would train as one. So it is refused with the reason unused_media
until the mapping says what the medium is, or lists it under `ignore`. Everything else (names, labels, sizes, addresses) may be
in a record without being used. Media are recognised by their values if these are bytes, else by the endings of their names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record, is_absent
from headrace.quarantine import BadSampleError, Reason

# Formats that no decoder takes are listed too, so that such a sample is refused by name.
IMAGE_EXTENSIONS = frozenset((
    "jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "heic", "avif", "jp2", "j2k", "svg", "ppm", "pgm", "pbm", "pnm",
    "pfm",
))  # fmt: skip
AUDIO_EXTENSIONS = frozenset(("flac", "wav", "mp3", "ogg", "opus", "aif", "aiff", "caf", "m4a", "aac", "wma", "amr"))
_VIDEO_EXTENSIONS = frozenset(("mp4", "m4v", "mkv", "webm", "mov", "avi", "mpg", "mpeg", "wmv", "flv", "pdf"))
_KINDS = {"image": IMAGE_EXTENSIONS, "audio": AUDIO_EXTENSIONS, "video": _VIDEO_EXTENSIONS}
# Extensions of members that describe a sample and are not part of it; a member with any other one is taken for a medium.
_NOTES = frozenset((
    "txt", "text", "transcript", "lab", "srt", "vtt", "md", "html", "htm", "xml", "csv", "tsv", "json", "jsn", "jsonl", "yaml",
    "yml", "url", "lang", "license", "log", "cls", "cls2", "class", "count", "index", "inx", "idx", "id", "key", "len", "score",
    "md5", "sha1", "sha256",
))  # fmt: skip
_PLACEHOLDERS = re.compile(
    r"<(?:video|speech|sound|ImageHere|image[_-]placeholder|start_of_image|image_soft_token|image_token|bbox|ref-object)>"
    r"|<(?:image|audio|video)[ _:]?[0-9]{1,2}>|<\|(?:image|video|audio)(?:_[0-9]{1,2})?\|>"
    r"|<\|vision_start\|><\|image_pad\|>|<\|video_pad\|>|<\|AUDIO\|>"
    r"|\[IMG\](?!\s*(?:\w+:|/))"  # not the one of forums, which an address follows
    r"|<img>[^<>\n]{1,512}</img>|<Audio>[^<>\n]{1,512}</Audio>"  # of Qwen-VL and Qwen-Audio, with the name of a file
    r"|\A\s*<(?:IMAGE|Image|img)>(?=\s*\n)|(?<=\n)<(?:IMAGE|Image|img)>\s*\Z"  # alone on the first or last line
)
"""Placeholders that other trainers write in the place of a medium."""
_MEDIA_WORDS = {"img": "image", "imgs": "image", "picture": "image", "photo": "image", "wav": "audio", "videos": "video"}
_MEDIA_WORDS |= {word: word for word in ("image", "audio", "video", "pdf")}
_FILE_WORDS = frozenset(("file", "files", "path", "paths", "filepath", "filename", "url", "urls"))
_ALONE = frozenset(("img", "imgs", "wav", "video", "videos", "pdf"))
"""Field names that suffice to tell a medium; other words for media need one of `_FILE_WORDS` beside them."""
_ANOTHER = re.compile(
    r"(?i)(?:^|_)(?:masks?|seg|segmentation|depth|normals?|edges?|sketch|conditioning|target|edited|reference|input|output|before"
    r"|after|left|right)(?:_|$)|(?:image|img|picture|photo|audio|wav)_[ab]$"
    r"|(?:image|img|picture|photo|audio|wav)_?[0-9]+$"
)
"""Fields that name another medium than the one beside the text."""
_STRUCT = {"bytes", "path"}  # keys of a medium in Hugging Face's Parquet files
_DOWNLOADED = {"url", "key", "status", "error_message"}  # what img2dataset says of each medium
_LONGEST_NAME = 1024
_ENCODED = (
    "data:image/", "data:audio/", "data:video/", "/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR", "T2dnU", "ZkxhQ", "SUkqA", "TU0AK",
)  # fmt: skip
"""What the files of media begin with in base64, or in a data URL."""
_LEAST_ENCODED = 128  # characters: no name of a file looks like that by chance
_NUMBER = re.compile(r"(?i)(?:image|img|video|audio|clip)_?ids?")
_SPEAKING = re.compile(r"(?i)image|img|picture|photo|audio|speech|video")
_BEGINNINGS = ("offset", "start", "start_time", "begin", "begin_time")
_SAID = frozenset(("user", "assistant", "value", "content"))
"""Fields of a turn that hold its words."""
_OF_PARTS = frozenset((
    "type", "text", "from", "role", "index", "source", "image", "image_url", "audio", "audio_url", "input_audio", "path", "url",
    "bytes", "base64", "data", "tool_calls", "reasoning_content", "reasoning", "thinking",
))  # fmt: skip
"""Fields of turns and typed parts that are read, or refused, by those who parse them."""
_DEPTH, _LOOKED_AT = 4, 8  # lists and objects inside of each other, and items of a list, in which a medium is looked for


def ignored(name: str, spec: MappingSpec) -> bool:
    """Whether the mapping's `ignore` lists a field, or a member's extension or the last part of that."""
    return name in spec.ignore or name.rsplit(".", 1)[-1] in spec.ignore


def members_of_kind(record: Record, extensions: frozenset[str], spec: MappingSpec) -> tuple[str, ...]:
    """Return the record's members with one of these extensions; several must be numbered alike, such as `0.jpg` and `1.png`.

    Raises BadSampleError with unused_media if nothing says which of several is meant.
    """
    names = tuple(name for name in record.members if _ending(name) in extensions and not ignored(name, spec))
    if len(names) > 1 and not _numbered_alike([name.rpartition(".")[0] for name in names]):
        raise BadSampleError(
            Reason.UNUSED_MEDIA,
            f"nothing says which of the members {', '.join(names)} are meant: name one in the mapping's images or audios, or "
            "list the others under its ignore",
        )
    return names


def _numbered_alike(stems: Sequence[str]) -> bool:
    return len(set(stems)) == len(stems) and len({re.sub(r"[0-9]+", "0", stem) for stem in stems}) == 1


def check_members(record: Record, used: Collection[str], settled: Iterable[str], spec: MappingSpec) -> None:
    """Raise BadSampleError with unused_media if a member that is not in `used` is a medium.

    `settled`: kinds (`image`, `audio`) for which the mapping names what is used, so that other members of them are accepted.
    """
    known = _NOTES.union(*(_KINDS[kind] for kind in settled))
    for name in record.members:
        if name not in used and _ending(name) not in known and not ignored(name, spec):
            raise _unused(f"the member {name}", name, _takers(_kind_of_name(name)))


def check_fields(
    record: Record, used: Collection[str], taken: Collection[str], settled: Collection[str], spec: MappingSpec
) -> None:
    """Raise BadSampleError with unused_media if a field not in `used` holds a medium, or names one that is wanted; with
    missing_media if the fields say, as img2dataset's do, that the medium could not be fetched.

    `settled`: kinds (`image`, `audio`) for which the mapping names what is used, so that no other one is wanted. `taken`: kinds
    of which the sample has media. A name is then taken for another one of the same medium, unless its field says otherwise
    (`mask`, `image2`).
    """
    if record.fields.keys() >= _DOWNLOADED and (status := record.fields["status"]) != "success":
        raise BadSampleError(Reason.MISSING_MEDIA, f"the status is {str(status)[:80]}: img2dataset could not fetch the medium")
    for name, value in record.fields.items():
        if not value or name in used or ignored(name, spec):
            continue
        for field, leaf in _leaves(name, value, _DEPTH):
            if not isinstance(leaf, str) or _is_encoded(leaf):
                raise _unused(f"what {name} holds", name, _takers(None))
            kind = _named_kind(field, leaf)
            if kind and kind not in settled and (kind not in taken or _ANOTHER.search(field)):
                raise _unused(f"{leaf[:80]!r}, which {name} names", name, _takers(kind))


def check_whole(fields: Mapping[str, Any], spec: MappingSpec) -> None:
    """Raise BadSampleError with schema_error if the fields say that only a part of the recording is meant, and not which one."""
    for name in _BEGINNINGS:
        value = fields.get(name)
        if isinstance(value, int | float) and value > 0 and name not in spec.ignore:
            if name == "offset" and part_of(fields, spec) is not None:
                continue
            raise BadSampleError(
                Reason.SCHEMA_ERROR,
                f"the recording is meant from its {name} {value:g} on, and parts are read by an offset and a duration alone: "
                f"give these, or list {name!r} under the mapping's ignore where it is cut already",
            )


def part_of(fields: Mapping[str, Any], spec: MappingSpec) -> tuple[float, float] | None:
    """Return where the part of a recording begins that is meant, and how long it is, in seconds; None where all of it is.

    A manifest of parts of files has an `offset` and a `duration` in each row, and the first part of a file has the offset 0.
    """
    part = [fields.get(name) if name not in spec.ignore else None for name in ("offset", "duration")]
    numbers = [float(value) for value in part if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(part) or not all(map(math.isfinite, numbers)):
        return None
    offset, duration = numbers
    return (offset, duration) if offset >= 0 and duration > 0 else None


def check_elsewhere(record: Record, used: Collection[str], spec: MappingSpec, *, is_pair: bool) -> None:
    """Raise BadSampleError with unused_media if a field not in `used` has the number of a medium, for a text that has none.

    Captions and questions about pictures are published without them, with an `image_id`: such a text is not the whole sample.
    Beside a question and its answer (`is_pair`) any field that speaks of a medium counts.
    """
    for name, value in record.fields.items():
        speaks = _SPEAKING.search(name) if is_pair else _NUMBER.fullmatch(name)
        if speaks and name not in used and name not in spec.ignore and not is_absent(value):
            raise BadSampleError(
                Reason.UNUSED_MEDIA,
                f"the text may be about the medium of which {name} speaks: name the field that has it in the mapping's images or "
                f"audios, or list {name!r} under its ignore",
            )


def check_turns(field: str, turns: Any, media: Collection[str], spec: MappingSpec) -> None:
    """Raise BadSampleError with unused_media if a turn, or a typed part of one, holds or names a medium outside of its words.

    `turns`: the value of `field`, which may be no list of turns. `media`: names of media that the sample has.
    """
    for index, item in enumerate(turns if isinstance(turns, list) else ()):
        if not isinstance(item, Mapping):
            continue
        for name, value in item.items():
            if name in _SAID:
                check_turns(f"{field}[{index}].{name}", value, media, spec)
            elif value and name not in _OF_PARTS and name not in spec.ignore:
                for inner, leaf in _leaves(name, value, _DEPTH):
                    if not isinstance(leaf, str) or _is_encoded(leaf) or (_named_kind(inner, leaf) and leaf not in media):
                        raise _unused(f"what {field}[{index}].{name} holds", name, "")


def check_text(text: str, spec: MappingSpec) -> None:
    """Raise BadSampleError with unused_media if the text has another trainer's placeholder that the mapping does not name."""
    if "<" not in text and "[" not in text:
        return
    others = text.replace(spec.image_placeholder, "").replace(spec.audio_placeholder, "")
    for found in map(str.strip, _PLACEHOLDERS.findall(others)):
        if found not in spec.ignore:
            raise BadSampleError(
                Reason.UNUSED_MEDIA,
                f"{found[:80]} in the text stands for a medium, and nothing takes it: name it as the mapping's image_placeholder "
                "or audio_placeholder, or list it under its ignore where it is text",
            )


def _is_encoded(text: str) -> bool:
    return text.startswith(_ENCODED) and len(text) >= _LEAST_ENCODED


def _leaves(field: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield what may be or name a medium in a value, `depth` lists or objects deep: strings, bytes and `{bytes, path}`.

    Each comes with its field. Of a list only the first items are looked at.
    """
    if isinstance(value, str | bytes) or (isinstance(value, dict) and value.keys() == _STRUCT and any(value.values())):
        yield field, value
    elif isinstance(value, dict) and depth:
        for name, item in value.items():
            yield from _leaves(name, item, depth - 1)
    elif isinstance(value, list | tuple) and depth:
        for item in value[:_LOOKED_AT]:
            yield from _leaves(field, item, depth - 1)


def _ending(name: str) -> str:
    return name.rsplit(".", 1)[-1].lower()


def _kind_of_name(name: str) -> str | None:
    return next((kind for kind, extensions in _KINDS.items() if _ending(name) in extensions), None)


def _named_kind(field: str, value: str) -> str | None:
    """Return the kind of medium that a field names; None if it names none.

    It is told by the field (`video`, `image_path`, `audioFilePath`) or by the file extension at the end of the value. The web
    address of a PDF does not count: it says where a text comes from.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", field)]
    told = next((_MEDIA_WORDS[word] for word in words if word in _MEDIA_WORDS), None)
    if told and (field.lower() in _ALONE or _FILE_WORDS.intersection(words)):
        return "video" if told == "pdf" else told
    if len(value) > _LONGEST_NAME or any(blank in value for blank in " \n\t") or "." not in value:
        return None
    if "://" not in value:
        return _kind_of_name(value)
    path = value.partition("?")[0]
    return None if _ending(path) == "pdf" else _kind_of_name(path)


def _takers(kind: str | None) -> str:
    """Return the fields of a mapping that take a kind of media; None: it is not known which kind it is."""
    return {"image": "images", "audio": "audios", None: "images or audios"}.get(kind, "")


def _unused(what: str, name: str, takers: str) -> BadSampleError:
    """Return the refusal of a medium that the mapping's fields `takers` may take; "" if none can."""
    take = f"name it in the mapping's {takers}, or " if takers else ""
    return BadSampleError(
        Reason.UNUSED_MEDIA, f"nothing uses {what}: {take}list {name!r} under the mapping's ignore to train without it"
    )
