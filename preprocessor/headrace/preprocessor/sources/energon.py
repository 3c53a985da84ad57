"""Megatron-Energon data sets: a folder of WebDataset shards described by files in `.nv-meta`.

    split.yaml                  the shards of each split, and the shards and samples that are left out
    .info.json or .info.yaml    marks a prepared data set
    dataset.yaml                the class of the samples, and the tar member that each of their fields comes from

A source's path names the split after a "#": "/data/coyo#val", or its field `split` does; the default is `train`. `dataset_config`
and `split_config` name other files: "/data/coyo#split=val&dataset_config=ocr.yaml".

Fields are passed to the mapping under their own names, so that the usual ones (image, caption, text, conversations, ...) need
no mapping; `context` and `answers` of a VQASample become a question and the answer of the largest weight. Samples of a
CrudeWebdataset, or of a data set without dataset.yaml, are passed on like those of any tar. No Python that a data set names
is loaded or run: a data set with a sample_loader needs another dataset_config.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

import fsspec
import yaml

from headrace.errors import DatasetError, HeadraceError
from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.annotation import parse_text
from headrace.preprocessor.sources.base import MAX_ANNOTATION_BYTES, Shard, check_size
from headrace.preprocessor.sources.blob import BlobCache, filesystem, is_remote, read_file
from headrace.preprocessor.sources.braces import expand_all
from headrace.preprocessor.sources.splits import ALL
from headrace.preprocessor.sources.webdataset import WebDatasetShard
from headrace.quarantine import BadSampleError, Reason
from headrace.source_spec import SourceSpec

META = ".nv-meta"
MAX_YAML_BYTES = 16 * 2**20  # room for 200,000 shard names; parsing YAML takes a second per megabyte
RECIPE_S = 30.0
_INFO_NAMES = (".info.json", ".info.yaml")
_recipes_lock = threading.Lock()
_TEXT_PARTS = frozenset(("txt", "text", "transcript"))
_JSON_PARTS = frozenset(("json", "jsn"))
_NUMBER_PARTS = frozenset(("cls", "cls2", "class", "count", "index", "inx", "id"))
_ACCESS = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_WITHOUT_TEXT = frozenset(("ImageSample", "ImageClassificationSample", "SimilarityInterleavedSample", "MultiChoiceVQASample"))

Paths = tuple[tuple[str, ...], ...]  # alternative places of a field's value, each a member's extension, then keys into it


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The folder of a data set, its split and its configuration files, as a source's path selects them."""

    root: str
    split: str = "train"
    dataset_config: str = "dataset.yaml"
    split_config: str = "split.yaml"

    def path(self) -> str:
        """Return the source path that `parse_selection` would parse to this selection."""
        return f"{self.root}#split={self.split}&dataset_config={self.dataset_config}&split_config={self.split_config}"


def parse_selection(path: str) -> Selection:
    """Parse a source's path, with the options after its "#". Raises DatasetError where an option is unknown.

    A path is taken literally where a file or folder has that name, "#" included, or what follows the "#" looks like a path.
    """
    root, _, fragment = path.partition("#")
    if "/" in fragment or "." in fragment.partition("=")[0] or os.path.exists(path):
        return Selection(root=path)
    if "=" not in fragment:
        return Selection(root=root, split=fragment or "train")
    options = dict(parse_qsl(fragment))
    unknown = options.keys() - {"split", "dataset_config", "split_config"}
    if unknown:
        raise DatasetError(f"{path}: after '#' stand split, dataset_config and split_config, not {', '.join(sorted(unknown))}")
    return Selection(root=root, **options)


def selection_of(source: SourceSpec) -> Selection:
    """Return what a source's path and its field `split` select. Raises DatasetError where they name different splits."""
    selection = parse_selection(source.path)
    if source.split is None:
        return selection
    if selection.split not in ("train", source.split):
        raise DatasetError(f"{source.path} and `split: {source.split}` name different splits; name one of them")
    return replace(selection, split=source.split)


def is_dataset(fs: fsspec.AbstractFileSystem, root: str) -> bool:
    """Whether `root` is the folder of a prepared Energon data set. Raises whatever the driver raises."""
    with ThreadPoolExecutor(len(_INFO_NAMES)) as pool:  # so that a server that is far away answers both at a time
        return any(list(pool.map(fs.isfile, (f"{root.rstrip('/')}/{META}/{name}" for name in _INFO_NAMES))))


def split_shards(fs: fsspec.AbstractFileSystem, root: str, selection: Selection) -> list[str]:
    """Return the shards of the selected split that are not excluded, relative to `root`, in the split's order.

    The split `all` is that of every shard, unless the data set has one of that name.

    Raises DatasetError where there is no such split, or it has no shard.
    """
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


def read_recipe(source: SourceSpec) -> Recipe | None:
    """Read the recipe of a source that is the folder of an Energon data set; return None for any other source.

    A remote one is read once in RECIPE_S for all of its shards. Raises DatasetError where the data set cannot be read or its
    samples are of a kind that is not supported.
    """
    selection = selection_of(source)
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
        return _recipe(*_dataset_document(fs, root, selection), root, excluded)
    except HeadraceError:
        raise
    except Exception as err:  # drivers raise their libraries' errors as well
        message = f"cannot read the data set {selection.root}: {err}; check the path and its access"
        raise DatasetError(message) from err


class EnergonShard(Shard):
    """A tar shard of an Energon data set, whose records have the fields that dataset.yaml names."""

    def __init__(self, url: str, recipe: Recipe, mapping: MappingSpec, cache: BlobCache | None = None) -> None:
        name = posixpath.relpath(filesystem(url)[1], recipe.root)
        self._tar = WebDatasetShard(url, cache)
        self._recipe = recipe
        self._mapping = mapping
        self._rows = [row for row in range(self._tar.num_rows) if f"{name}/{self._tar.key(row)}" not in recipe.excluded]
        self.num_rows = len(self._rows)
        self.rejected = self._tar.rejected

    def key(self, row: int) -> str:
        """Return the key of the sample at `row`."""
        return self._tar.key(self._rows[row])

    def read(self, row: int) -> Record:
        """Return the record at `row`, with the recipe's fields. Raises BadSampleError where a field has no value."""
        row = self._rows[row]
        if self._recipe.fields is None:
            return self._tar.read(row)
        load = self._tar.loader(row)
        parts = _Parts(self._tar.extensions(row), load)
        fields = {name: parts.first(name, paths) for name, paths in self._recipe.fields.items()}
        return Record(key=self._tar.key(row), fields=_shaped(self._recipe.kind, fields, self._mapping), load=load)

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

    def __init__(self, extensions: tuple[str, ...], load: Callable[[str], bytes]) -> None:
        self._extensions = extensions
        self._load = load
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
            self._values[extension] = _part(extension, self._load)
        return self._values[extension]


def _part(extension: str, load: Callable[[str], bytes]) -> Any:
    kind = extension.rsplit(".", 1)[-1]
    if kind not in _TEXT_PARTS | _JSON_PARTS | _NUMBER_PARTS:
        return extension
    data = load(extension)
    check_size(f"the {extension} member", len(data), MAX_ANNOTATION_BYTES)
    text = parse_text(data, f"the {extension} member")
    if kind in _TEXT_PARTS:
        return text
    try:
        return json.loads(text) if kind in _JSON_PARTS else int(text)
    except (ValueError, RecursionError) as err:
        raise BadSampleError(Reason.SCHEMA_ERROR, f"the {extension} member is damaged: {err}") from err


def _shaped(kind: str, fields: dict[str, Any], mapping: MappingSpec) -> Mapping[str, Any]:
    """Return a sample's fields in the form that the mapping expects of its class."""
    if mapping.text is None and kind == "VQASample":
        question, answer = fields.get("context"), _best(fields.get("answers"), fields.get("answer_weights"))
        if not isinstance(question, str):
            raise BadSampleError(Reason.SCHEMA_ERROR, f"context: expected a string, got {type(question).__name__}")
        if "image" in fields and mapping.image_placeholder not in question:
            question = f"{mapping.image_placeholder}{question}"
        return {**fields, "texts": [{"user": question, "assistant": answer}]}
    if mapping.text is None and kind == "InterleavedSample":
        return {**fields, "texts": fields.get("sequence")}
    return fields


def _best(answers: Any, weights: Any) -> Any:
    """Return the answer with the largest weight, the first of equals; without usable weights the first answer."""
    if not isinstance(answers, list) or not answers:
        return answers
    if isinstance(weights, list) and len(weights) == len(answers) and all(isinstance(w, int | float) for w in weights):
        return answers[max(range(len(answers)), key=lambda index: weights[index])]
    return answers[0]


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
        return Recipe(root=root, kind=kind, fields=None, excluded=excluded)
    if kind in _WITHOUT_TEXT:
        raise DatasetError(f"{what} describes samples of {kind}, which are not taken; describe them as CrudeWebdataset")
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
