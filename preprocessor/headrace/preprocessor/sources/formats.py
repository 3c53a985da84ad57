"""Which files of a folder are its shards: those of one format, without the files that only describe them.

Formats are told by the ends of names. A folder with several is taken where all but the tars describe the tars, as img2dataset
writes them: `00000.parquet` beside `00000.tar`. JSON, CSV, Arrow and some packings often describe other files, or hold them
once more; they are shards only where there is nothing else.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from glob import has_magic

from headrace.errors import DatasetError
from headrace.preprocessor.records.unused_media import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS
from headrace.preprocessor.sources import lance_table, litdata, mds

_FIRST = {".tar": "tar", ".tar.gz": "tar", ".tgz": "tar", ".parquet": "Parquet", ".jsonl": "JSONL"}
_FIRST |= dict.fromkeys(mds.SUFFIXES, "MDS")
_FIRST_SUFFIXES = tuple(_FIRST)
_ROWS = {".jsonl": "JSONL", ".ndjson": "JSONL", ".json": "JSON", ".csv": "CSV", ".tsv": "CSV"}
_PACKED = {f"{end}{packing}": kind for end, kind in _ROWS.items() for packing in (".gz", ".zst", ".zstd", ".bz2")}
_NAMED = {"LitData": litdata.CHUNK, "Lance": lance_table.FRAGMENT}
"""Formats whose shards are told by other parts of their names than their ends."""
_OTHERWISE = {".tar.zst": "tar", ".tar.bz2": "tar", ".arrow": "Arrow", ".feather": "Arrow"} | _ROWS | _PACKED
_FORMATS = _OTHERWISE | _FIRST
SUFFIXES = tuple(_FORMATS)
_UNPACKED = ", ".join([*_FIRST, *(end for end in _ROWS if end not in _FIRST), ".arrow", ".feather"])
ENDS = f"{_UNPACKED}, also packed as .gz, .zst or .bz2"
"""The ends of shards' names, in words; LitData's chunks and Lance's fragments have names of their own."""

# Files with the suffix of a shard that other tools write beside their shards.
_DESCRIPTION = re.compile(
    r"(?:^|/)(?:(?:index|dataset_infos?|dataset_dict|state|config|package|meta|metadata|info|report)\.json"
    r"|(?:[^/]*_)?stats\.json|cache-[^/]*\.arrow)$"
)
_MEDIA = tuple(f".{extension}" for extension in sorted(IMAGE_EXTENSIONS | AUDIO_EXTENSIONS))
_REMEDIES = {
    "TFRecord": (r"\.tfrecords?(?:-\d+-of-\d+)?(?:\.gz)?$", "write them as WebDataset tars"),
    "Megatron's indexed tokens": (r"\.idx$", "give the texts that they were made from, as JSONL or Parquet"),
    "ORC": (r"\.orc$", "write them as Parquet"),
    "zip": (r"\.zip$", "unpack them, or write them as tars"),
    "HDF5": (r"\.(?:h5|hdf5)$", "write them as Parquet or WebDataset tars"),
    "NumPy or pickle": (r"\.(?:npy|npz|pkl|pickle|pt)$", "write them as Parquet or MDS"),
}
"""Formats that are not read: what tells them, and what to do."""


def has_shard_name(name: str) -> bool:
    """Whether a file is called as shards are."""
    return name.endswith(SUFFIXES) or any(pattern.search(name) for pattern in _NAMED.values())


def may_be_shard(name: str) -> bool:
    """Whether a file found in a folder may be a shard: it is called as one, and not as a description."""
    return has_shard_name(name) and not (name.endswith((".json", ".arrow")) and _DESCRIPTION.search(name))


def format_of(name: str) -> str:
    """Return the format of the shard with that name."""
    by_end = (kind for suffix, kind in _FORMATS.items() if name.endswith(suffix))
    return next(by_end, None) or next(kind for kind, pattern in _NAMED.items() if pattern.search(name))


def choose_format(shards: Sequence[str], files: Sequence[str], where: str, tell: Callable[[str], None]) -> list[str]:
    """Return those of `shards` that are of the data set's one format. `files`: the names of all of its files.

    `where` is the data set in messages; `tell` is called with a sentence where shards are left out. Raises DatasetError where
    several formats may be meant, or where a format is told that is not read.
    """
    first = [name for name in shards if name.endswith(_FIRST_SUFFIXES) or format_of(name) in _NAMED]
    taken = _without_descriptions(first or list(shards))
    examples = {format_of(name): name for name in sorted(taken, reverse=True)}
    if len(examples) > 1:
        raise _mixed(examples, taken, where)
    if "Lance" in examples:
        raise DatasetError(
            f"{where} holds a Lance data set ({examples['Lance']}): name its own folder, which has _versions in it"
        )
    if taken and not first:
        _check_described(taken, files, where)
    if examples.keys() == {"Parquet"}:
        _check_folders(taken, files, where)
    if left := sorted(set(shards).difference(taken)):
        tell(
            f"{where}: takes its {next(iter(examples))} files ({len(taken)}), and leaves {left[0]}"
            + (f" and {len(left) - 1} more of other formats" if len(left) > 1 else "")
        )
    return taken


def why_no_shard(files: Sequence[str], where: str) -> str:
    """Return a sentence on why a data set with these files has no shard."""
    if not files and has_magic(where):
        return f"no file matches {where}; mend the pattern, or name the folder"
    if told := next((said for kind in _REMEDIES if (said := _told(kind, files, where))), None):
        return told
    if told := _sidecar([name for name in files if name.endswith(".txt")], files, where):
        return told
    if media := min((name for name in files if name.lower().endswith(_MEDIA)), default=None):
        return (
            f"{where} holds media ({media}) and nothing that says what they show: write a metadata.jsonl beside them, each line "
            'with a file and its text, {"file_name": "...", "text": "..."}; the names of folders are not taken for texts'
        )
    return f"{where} holds no shard; shards are files that end in {ENDS}"


def _without_descriptions(names: list[str]) -> list[str]:
    """Return the tars alone where each other file has the name of a tar beside it, else all names."""
    tars = [name for name in names if format_of(name) == "tar"]
    stems = {_stem(name) for name in tars}
    return tars if tars and all(_stem(name) in stems for name in names) else names


def _mixed(examples: dict[str, str], names: Sequence[str], where: str) -> DatasetError:
    kinds = " and ".join(f"{kind} ({name})" for kind, name in sorted(examples.items()))
    one = max(examples)  # archives hold the media, while files beside them often only describe it
    suffix = next((suffix for suffix in SUFFIXES if examples[one].endswith(suffix)), ".bin")
    anywhere = "**/*" if any("/" in name for name in names) else "*"
    return DatasetError(
        f"{where} holds {kinds}, and a source is of one format: name those to train on, for example "
        f"{posixpath.join(where, anywhere + suffix)}, or make each a source"
    )


def _told(kind: str, files: Sequence[str], where: str) -> str | None:
    """Return a sentence on the files of a kind that is not read; None where there is no such file."""
    pattern, remedy = _REMEDIES[kind]
    found = min(filter(re.compile(pattern).search, files), default=None)
    return found and f"{where} holds {kind} ({found}), which is not read: {remedy}"


def _check_described(taken: Sequence[str], files: Sequence[str], where: str) -> None:
    """Raise DatasetError if there is a shard for each medium."""
    if told := _sidecar(taken, files, where):
        raise DatasetError(told)


def _sidecar(annotations: Sequence[str], files: Sequence[str], where: str) -> str | None:
    """Return a sentence on an annotation that has the name of a medium beside it; None where there is none."""
    stems = {name.rpartition(".")[0]: name for name in annotations}
    for medium in files if stems else ():
        if medium.lower().endswith(_MEDIA) and (name := stems.get(medium.rpartition(".")[0])):
            return (
                f"{where} holds a file for each medium ({name} for {medium}), and files of single samples are not read: pack "
                "them into tars, for example with `tar --sort=name`, or write one metadata.jsonl for all"
            )
    return None


def _check_folders(taken: Sequence[str], files: Sequence[str], where: str) -> None:
    """Raise DatasetError if a Parquet file has the number of a folder with media, which it then describes."""
    numbered = {stem: name for name in taken if (stem := _stem(name)).rpartition("/")[2].isdecimal()}
    for medium in files if numbered else ():
        if medium.lower().endswith(_MEDIA) and (name := numbered.get(medium.rpartition("/")[0])):
            raise DatasetError(
                f"{where} holds {name}, which only describes media in files ({medium}): write the data set as tars, in "
                "img2dataset with output_format=webdataset"
            )


def _stem(name: str) -> str:
    return name.removesuffix(next((suffix for suffix in SUFFIXES if name.endswith(suffix)), ""))
