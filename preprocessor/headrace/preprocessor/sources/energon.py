"""Megatron-Energon data sets: a folder of WebDataset shards described by files in `.nv-meta`.

    split.yaml                  the shards of each split, and the shards and samples that are left out
    .info.json or .info.yaml    marks a prepared data set, and counts the samples of its shards
    dataset.yaml                the class of the samples, and the tar member that each of their fields comes from

What a source takes of one stands in its path (energon_selection.py).

Fields are passed to the mapping under their own names, so that the usual ones (image, caption, text, conversations, ...) need
no mapping; some classes are told otherwise (energon_samples.py). Samples of a CrudeWebdataset, or of a data set without
dataset.yaml, are passed on like those of any tar, of them the parts that a part_filter lists. No Python that a data set names
is loaded or run: a data set with a sample_loader needs another dataset_config.
"""

from __future__ import annotations

import json
import posixpath
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import fsspec
import yaml

from headrace.errors import DatasetError, HeadraceError
from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.annotation import parse_text
from headrace.preprocessor.sources.base import MAX_ANNOTATION_BYTES, Shard, check_size
from headrace.preprocessor.sources.blob import BlobCache, filesystem, is_remote, read_file, url_of
from headrace.preprocessor.sources.braces import expand_all
from headrace.preprocessor.sources.energon_samples import shaped, why_not
from headrace.preprocessor.sources.energon_selection import Selection
from headrace.preprocessor.sources.splits import ALL
from headrace.preprocessor.sources.webdataset import WebDatasetShard
from headrace.quarantine import BadSampleError, Reason

META = ".nv-meta"
MAX_YAML_BYTES = 16 * 2**20  # room for 200,000 shard names; parsing YAML takes a second per megabyte
RECIPE_S = 30.0
_INFO_NAMES = (".info.json", ".info.yaml")
_recipes_lock = threading.Lock()
_TEXT_PARTS = frozenset(("txt", "text", "transcript"))
_JSON_PARTS = frozenset(("json", "jsn"))
_NUMBER_PARTS = frozenset(("cls", "cls2", "class", "count", "index", "inx", "id"))
_ACCESS = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")

Paths = tuple[tuple[str, ...], ...]  # alternative places of a field's value, each a member's extension, then keys into it


def is_dataset(fs: fsspec.AbstractFileSystem, root: str) -> bool:
    """Whether `root` is the folder of a prepared Energon data set. Raises whatever the driver raises."""
    with ThreadPoolExecutor(len(_INFO_NAMES)) as pool:  # so that a server that is far away answers both at a time
        return any(list(pool.map(fs.isfile, (f"{root.rstrip('/')}/{META}/{name}" for name in _INFO_NAMES))))


def split_shards(fs: fsspec.AbstractFileSystem, root: str, selection: Selection) -> list[str]:
    """Return the shards of the selected split that are not excluded, relative to `root`, in the split's order.

    The split `all` is that of every shard, unless the data set has one of that name. Of a part of the samples, only shards with
    some of them are returned.

    Raises DatasetError where there is no such split, or it has no shard.
    """
    names = _split_names(fs, root, selection)
    return list(_ranges(fs, root, selection, names)) if selection.is_part else names


def _split_names(fs: fsspec.AbstractFileSystem, root: str, selection: Selection) -> list[str]:
    document, what = _split_document(fs, root, selection)
    splits = document.get("split_parts")
    if isinstance(splits, dict) and selection.split == ALL:
        splits = {ALL: [name for part in splits.values() for name in _expanded(part, what)]} | splits
    if not isinstance(splits, dict) or selection.split not in splits:
        known = ", ".join(splits) if isinstance(splits, dict) else "none"
        raise DatasetError(f"{what} has no split {selection.split!r}; there are {known} (name one after '#' in the path)")
    excluded = _excluded(document, what)
    names = [name for name in _expanded(splits[selection.split], what) if name not in excluded]
    if not names:
        raise DatasetError(f"{what}: the split {selection.split!r} has no shard; name another split after '#' in the path")
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Which samples of a shard are taken, by their numbers in it: `start` up to, not including, `stop`."""

    start: int
    stop: int
    count: int
    """Samples of the shard, as its data set counts them."""


def _ranges(fs: fsspec.AbstractFileSystem, root: str, selection: Selection, names: list[str]) -> dict[str, Range]:
    """Return which samples of each shard a selection takes; shards without any are left out.

    Samples are numbered through the split's shards as Energon numbers them: by its own counts, with those that split.yaml
    excludes. Raises DatasetError where the rows are not there, or nothing counts them.
    """
    counts, what = _counts(fs, root, selection)
    if missing := [name for name in names if not isinstance(counts.get(name), int)]:
        raise DatasetError(f"{what} does not count the samples of {missing[0]}; run `energon prepare` again")
    whole = f"the split {selection.split!r} of {selection.root}"
    start, stop = selection.bounds(sum(counts[name] for name in names), whole)
    ranges: dict[str, Range] = {}
    first = 0
    for name in names:
        begin, end = max(start, first), min(stop, first + counts[name])
        if begin < end:
            ranges[name] = Range(start=begin - first, stop=end - first, count=counts[name])
        first += counts[name]
    if not ranges:
        raise DatasetError(f"{whole} has no sample from {start} to {stop}; give the subset a wider range")
    return ranges


def listed_shards(fs: fsspec.AbstractFileSystem, root: str) -> list[str]:
    """Return all shards of a data set, of any split, relative to `root`. Raises DatasetError."""
    return list(_counts(fs, root, Selection(root=url_of(fs, root)))[0])


def _counts(fs: fsspec.AbstractFileSystem, root: str, selection: Selection) -> tuple[dict[str, Any], str]:
    """Return how many samples each shard has, as the data set says itself; also returns the file's name for errors."""
    name = next(name for name in _INFO_NAMES if fs.isfile(f"{root.rstrip('/')}/{META}/{name}"))
    document, what = _document(fs, root.rstrip("/"), selection, name)
    counts = document.get("shard_counts")
    if not isinstance(counts, dict):
        raise DatasetError(f"{what} has no shard_counts; run `energon prepare` again")
    return counts, what


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the samples of an Energon data set are made from tar members, and which are left out."""

    root: str
    """The data set's folder, as a path in its file system."""
    kind: str
    """Name of the samples' Energon class, such as VQASample."""
    fields: Mapping[str, Paths] | None
    """The places that each field may come from; None where samples are read as in any tar."""
    excluded: frozenset[str]
    """SHARD/KEY of the samples to leave out; names of whole shards may be among them."""
    parts: frozenset[str] | None = None
    """Extensions of the members that samples have, if `fields` is None; None: all."""
    ranges: Mapping[str, Range] | None = None
    """The samples of each shard that are taken; None: all of all shards."""


def recipe_of(selection: Selection) -> Recipe | None:
    """Read the recipe of the folder of an Energon data set; return None for anything else.

    A remote one is read once in RECIPE_S for all of its shards. Raises DatasetError where the data set cannot be read or its
    samples are of a kind that is not supported. Of a data set that is joined with others, that is not asked.
    """
    if not is_remote(selection.root):
        return _read_recipe(selection)
    with _recipes_lock:
        return _recent_recipe(selection, int(time.monotonic() / RECIPE_S))


@lru_cache(maxsize=64)
def _recent_recipe(selection: Selection, _time: int) -> Recipe | None:
    return _read_recipe(selection)


def _read_recipe(selection: Selection) -> Recipe | None:
    try:
        fs, root = filesystem(selection.root)
        root = root.rstrip("/")
        if "*" in root or posixpath.splitext(root)[1] in (".tar", ".gz", ".tgz") or not is_dataset(fs, root):
            return None
        excluded = frozenset(_excluded(*_split_document(fs, root, selection)))
        document, what = _dataset_document(fs, root, selection)
        recipe = _recipe(document, what, root, excluded)
        if recipe.fields is not None and not selection.joiner and (problem := why_not(recipe.kind, recipe.fields)):
            raise DatasetError(f"{what} {problem}")
        if selection.is_part:
            recipe = replace(recipe, ranges=_ranges(fs, root, selection, _split_names(fs, root, selection)))
        return recipe
    except HeadraceError:
        raise
    except Exception as err:  # drivers raise their libraries' errors as well
        message = f"cannot read the data set {selection.root}: {err}; check the path and its access"
        raise DatasetError(message) from err


class EnergonShard(Shard):
    """A tar shard of an Energon data set, whose records have the fields that dataset.yaml names."""

    def __init__(self, url: str, recipe: Recipe, mapping: MappingSpec, cache: BlobCache | None = None) -> None:
        self.name = posixpath.relpath(filesystem(url)[1], recipe.root)
        self._tar = WebDatasetShard(url, cache, recipe.parts)
        self.kind = recipe.kind
        self.is_typed = recipe.fields is not None
        self._recipe = recipe
        self._mapping = mapping
        self.rejected = self._tar.rejected
        rows = range(self._tar.num_rows) if recipe.ranges is None else self._part(recipe.ranges[self.name])
        self._rows = [row for row in rows if f"{self.name}/{self._tar.key(row)}" not in recipe.excluded]
        self.num_rows = len(self._rows)

    def key(self, row: int) -> str:
        """Return the key of the sample at `row`."""
        return self._tar.key(self._rows[row])

    def read(self, row: int) -> Record:
        """Return the record at `row`, with the recipe's fields. Raises BadSampleError where a field has no value."""
        if self._recipe.fields is None:
            return self._tar.read(self._rows[row])
        return Record(key=self.key(row), fields=shaped(self._recipe.kind, self.mapped(row), self._mapping), load=self.loader(row))

    def mapped(self, row: int, folder: str = "") -> dict[str, Any]:
        """Return the fields that the field map gives the sample at `row`; media are their extensions behind `folder`.

        Raises BadSampleError where a field has no value.
        """
        parts = _Parts(self._tar.extensions(self._rows[row]), self.loader(row), folder)
        return {name: parts.first(name, paths) for name, paths in (self._recipe.fields or {}).items()}

    def loader(self, row: int) -> Callable[[str], bytes]:
        """Return a function that reads a member of the sample at `row` by its extension; see `Record.load`."""
        return self._tar.loader(self._rows[row])

    def _part(self, part: Range) -> list[int]:
        """Return the rows of a part of the samples, which are numbered with damaged ones; forget the damage of others.

        Raises DatasetError where the archive has not as many as are counted, so that the numbers mean other samples.
        """
        at = self._tar.rejected_at
        found = self._tar.num_rows + len(at)
        if found != part.count and all(item.name for item in self.rejected):
            raise DatasetError(
                f"{self.name} of {self._recipe.root} has {found} samples, and {part.count} where it was prepared, so that a "
                "subset would take others than are meant: run `energon prepare` again"
            )
        self.rejected = tuple(item for item in self.rejected if part.start <= at.get(item.name, part.start) < part.stop)
        sound = sorted(set(range(found)).difference(at.values())) if at else range(found)
        return [row for row, number in enumerate(sound) if part.start <= number < part.stop]

    def prefetch(self, rows: Sequence[int]) -> None:
        """Ask for the samples; see `Shard.prefetch`."""
        self._tar.prefetch([self._rows[row] for row in rows])

    def annotations(self, paths: Collection[str] | None) -> Iterator[Mapping[str, Any] | None]:
        """Yield the fields of each sample; see `Shard.annotations`."""
        self._tar.fetch_whole()
        yield from super().annotations(paths)

    def close(self) -> None:
        """Close the archive."""
        self._tar.close()


class _Parts:
    """The tar members of one sample, each read at most once and only if a field comes from it."""

    def __init__(self, extensions: tuple[str, ...], load: Callable[[str], bytes], folder: str) -> None:
        """`folder`: what is put in front of the extensions that media are called by."""
        self._extensions = extensions
        self._load = load
        self._folder = folder
        self._values: dict[str, Any] = {}

    def first(self, field: str, paths: Paths) -> Any:
        """Return the value at the first of `paths` that exists: for media the member's extension, for others the content.

        Raises BadSampleError (schema_error) where none of them exists.
        """
        for path in paths:
            value = self._at(path)
            if value is not None:
                return value
        wanted = ", ".join("".join([path[0], *(f"[{key}]" for key in path[1:])]) for path in paths)
        raise BadSampleError(Reason.SCHEMA_ERROR, f"{field}: nothing at {wanted}, only {', '.join(self._extensions)}")

    def _at(self, path: tuple[str, ...]) -> Any:
        extension = path[0].lower()
        if extension not in self._extensions:
            return None
        value = self._value(extension)
        for key in path[1:]:
            if isinstance(value, dict):
                value = value.get(key)
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        return value

    def _value(self, extension: str) -> Any:
        if extension not in self._values:
            self._values[extension] = _part(extension, self._load, self._folder)
        return self._values[extension]


def _part(extension: str, load: Callable[[str], bytes], folder: str) -> Any:
    kind = extension.rsplit(".", 1)[-1]
    if kind not in _TEXT_PARTS | _JSON_PARTS | _NUMBER_PARTS:
        return folder + extension
    data = load(extension)
    check_size(f"the {extension} member", len(data), MAX_ANNOTATION_BYTES)
    text = parse_text(data, f"the {extension} member")
    if kind in _TEXT_PARTS:
        return text
    try:
        return json.loads(text) if kind in _JSON_PARTS else int(text)
    except (ValueError, RecursionError) as err:
        raise BadSampleError(Reason.SCHEMA_ERROR, f"the {extension} member is damaged: {err}") from err


def _recipe(document: Mapping[str, Any], what: str, root: str, excluded: frozenset[str]) -> Recipe:
    declared = document.get("sample_type")
    named = declared.get("__class__") if isinstance(declared, dict) else document.get("__class__")
    kind = str(named or "CrudeSample").replace("Webdataset", "Sample")  # older files name the class of the reader
    if document.get("sample_loader") is not None:
        raise DatasetError(
            f"{what} has a sample_loader, which is Python code and is not run; prepare a dataset_config with a field_map "
            "or with CrudeWebdataset, and name it after '#' in the path"
        )
    if kind == "CrudeSample":
        parts = document.get("part_filter")
        if parts is not None and not (isinstance(parts, list) and all(isinstance(part, str) for part in parts)):
            raise DatasetError(f"{what} has a part_filter that is Python code and is not run; list the extensions that it admits")
        return Recipe(
            root=root,
            kind=kind,
            fields=None,
            excluded=excluded,
            parts=None if parts is None else frozenset(map(str.lower, parts)),
        )
    fields = document.get("field_map")
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise DatasetError(f"{what} has no field_map from fields to parts like 'jpg' or 'json[caption]'; add one")
    return Recipe(root=root, kind=kind, fields={name: _paths(value, what) for name, value in fields.items()}, excluded=excluded)


def _paths(text: str, what: str) -> Paths:
    """Parse "json[a][b],txt" into (("json", "a", "b"), ("txt",)). Raises DatasetError where it is malformed."""
    matches = [_ACCESS.fullmatch(option.strip()) for option in text.split(",")]
    if not all(matches):
        raise DatasetError(f"{what}: the field_map has {text!r}; parts are written like 'jpg', 'json[caption]' or 'jpg,png'")
    return tuple((match[1], *re.findall(r"\[([^\[\]]+)\]", match[2])) for match in matches if match)


def _excluded(document: Mapping[str, Any], what: str) -> set[str]:
    return set(_expanded(document.get("exclude") or [], what))


def _expanded(patterns: Any, what: str) -> list[str]:
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise DatasetError(f"{what}: expected a list of names of shards, got {patterns!r}")
    try:
        names = expand_all(patterns)
    except (ValueError, RecursionError) as err:
        raise DatasetError(f"{what}: {err}; name fewer shards, or fewer at a time") from err
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise DatasetError(f"{what}: {name!r} leads outside of the data set; name shards relative to its folder")
    return names


def _split_document(fs: fsspec.AbstractFileSystem, root: str, selection: Selection) -> tuple[dict[str, Any], str]:
    """Read the file that assigns shards to splits; also returns its name for errors."""
    try:
        return _document(fs, root, selection, selection.split_config)
    except FileNotFoundError:
        if selection.split_config != "split.yaml":
            raise
        return _document(fs, root, selection, "split.json")


def _dataset_document(fs: fsspec.AbstractFileSystem, root: str, selection: Selection) -> tuple[dict[str, Any], str]:
    """Read the file that says how samples are made; also returns its name for errors. Both are empty without dataset.yaml."""
    try:
        return _document(fs, root, selection, selection.dataset_config)
    except FileNotFoundError:
        if selection.dataset_config != "dataset.yaml":
            raise
        return {}, ""


def _document(fs: fsspec.AbstractFileSystem, root: str, selection: Selection, name: str) -> tuple[dict[str, Any], str]:
    what = f"{selection.root}/{META}/{name}"
    return load_yaml(read_file(fs, f"{root}/{META}/{name}", MAX_YAML_BYTES), what), what


def load_yaml(data: bytes, what: str) -> dict[str, Any]:
    """Parse a YAML or JSON file that holds a mapping; `what` names it in errors. Raises DatasetError where it does not."""
    try:
        document = yaml.safe_load(data)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as err:
        raise DatasetError(f"{what} is not valid YAML: {' '.join(str(err).split())}") from err
    if not isinstance(document, dict):
        raise DatasetError(f"{what} is no mapping of fields, but {type(document).__name__}; prepare the data set again")
    return document
