"""Expansion of Megatron-Energon metadatasets, YAML files that blend data sets, into sources of a job.

    blend             data sets with weights: become sources with weights; the weights of nested blends are multiplied
    blend_epochized   data sets with repetitions, which need not be whole: become sources with repetitions
    join              data sets joined by key, by one of Energon's own classes: becomes one source
    path alone        one data set

    subset            a part of the samples, at any of these; the inner one is taken first
    aux               of a data set: where media are that its samples name

Weights and repetitions cannot be mixed, nor can a blend with weights stand beside sources without. Subflavors and shuffling
options have no meaning for a mapping and are ignored; anything else that is not known is refused.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from headrace.errors import DatasetError, HeadraceError
from headrace.preprocessor.sources.auxiliary import FILES
from headrace.preprocessor.sources.blob import filesystem, read_file
from headrace.preprocessor.sources.energon import MAX_YAML_BYTES, load_yaml
from headrace.preprocessor.sources.energon_selection import NONMATCHES, Joined, Selection, parse_selection, selection_of
from headrace.source_spec import SourceSpec
from headrace.spec import JobSpec, parse_spec

SUFFIXES = (".yaml", ".yml")
MAX_DEPTH = 16
_IGNORED = ("subflavors", "shuffle_over_epochs_multiplier", "__module__", "__class__")
_NODES = ("blend_epochized", "blend", "datasets", "join", "path")
_CONFIGS = ("dataset_config", "split_config")
_KNOWN = frozenset((*_NODES, *_CONFIGS, *_IGNORED, "joiner", "nonmatch", "split_part", "weight", "repetitions", "subset", "aux"))
_PERCENT = re.compile(r"(\d+(?:\.\d*)?)%")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """A data set of a blend, with its weight or its repetitions."""

    path: str
    weight: float | None = None
    repetitions: Fraction = Fraction(1)


def is_metadataset(source: SourceSpec) -> bool:
    """Whether a source is a metadataset, by its suffix; it must be expanded before the job is submitted."""
    return parse_selection(source.path).root.endswith(SUFFIXES)


def expand(spec: JobSpec) -> JobSpec:
    """Replace every metadataset among a job's sources by its data sets; return the same spec where there is none.

    Reads the YAML files but no shard. The new sources are named SOURCE.FOLDER, with -2, -3, ... where that is not unique.
    Raises DatasetError where a file is missing or damaged, mixes weights and repetitions, or uses what is not supported.
    """
    if not any(is_metadataset(source) for source in spec.sources):
        return spec
    groups = [(source, _leaves(source)) for source in spec.sources]
    leaves = [leaf for _, group in groups for leaf in group]
    weighted = {leaf.weight is not None for leaf in leaves}
    if len(weighted) > 1:
        raise DatasetError(
            f"the sources {', '.join(source.name for source in spec.sources)} mix weights and none; give every source a weight, "
            "and use blend instead of blend_epochized in what they name"
        )
    sources = []
    for source, group in groups:
        names = _Names(source)
        for leaf in group:
            changes: dict[str, Any] = {"path": leaf.path, "name": names.of(leaf), "weight": leaf.weight}
            times = leaf.repetitions * Fraction(str(source.repetitions or 1))
            changes["repetitions"] = None if times == 1 else float(times)
            if is_metadataset(source):
                changes["split"] = None  # each path of a blend names its own
            sources.append({**source.model_dump(), **changes})
    return parse_spec({**spec.model_dump(), "sources": sources})


class _Names:
    """Makes distinct names for the sources that one source expands to, the same in every run."""

    def __init__(self, source: SourceSpec) -> None:
        self._source = source.name
        self._blend = is_metadataset(source)
        self._seen: Counter[str] = Counter()

    def of(self, leaf: _Leaf) -> str:
        """Return the name of the next source, made from the folder of `leaf`."""
        name = self._source
        if self._blend:
            folder = posixpath.basename(parse_selection(leaf.path).root.rstrip("/"))
            name = f"{name.partition('#')[0].removesuffix('.yaml')}.{folder}"
        self._seen[name] += 1
        return name if self._seen[name] == 1 else f"{name}-{self._seen[name]}"


def _leaves(source: SourceSpec) -> list[_Leaf]:
    if not is_metadataset(source):
        return [_Leaf(path=source.path, weight=source.weight)]
    leaves = list(_file(selection_of(source), f"source {source.name!r}: ", 0))
    if source.weight is None:
        return leaves
    if any(leaf.repetitions != 1 for leaf in leaves):
        raise DatasetError(f"source {source.name!r}: {source.path} repeats data sets and has a weight; leave the weight out")
    total = sum(leaf.weight or 1.0 for leaf in leaves)
    return [replace(leaf, weight=source.weight * (leaf.weight or 1.0) / total) for leaf in leaves]


def _file(selection: Selection, context: str, depth: int) -> Iterator[_Leaf]:
    """Yield the data sets in the selected split of a metadataset file. Raises DatasetError."""
    what = f"{context}{selection.root}"
    if depth > MAX_DEPTH:
        raise DatasetError(f"{what}: metadatasets are nested more than {MAX_DEPTH} deep; does one name itself?")
    try:
        fs, path = filesystem(selection.root)
        document = load_yaml(read_file(fs, path, MAX_YAML_BYTES), what)
    except HeadraceError:
        raise
    except Exception as err:  # drivers raise their libraries' errors as well
        raise DatasetError(f"{what}: cannot read the metadataset ({err}); expand the job where the file can be read") from err
    splits = document.get("splits")
    if not isinstance(splits, dict) or not isinstance(splits.get(selection.split), dict):
        known = ", ".join(splits) if isinstance(splits, dict) else "none"
        raise DatasetError(f"{what} has no split {selection.split!r}; there are {known} (name one after '#' in the path)")
    yield from _node(splits[selection.split], selection, what, depth)


def _node(node: Mapping[str, Any], selection: Selection, what: str, depth: int) -> Iterator[_Leaf]:
    """Yield the data sets of a node of the YAML. `selection`: of the file, with the part that is taken of what the node gives.

    Raises DatasetError for a node that is not known.
    """
    if unknown := [key for key in node if key not in _KNOWN]:
        raise DatasetError(f"{what} has an entry with {unknown[0]}, which is not known there; take it out, or correct its name")
    kind = next((key for key in _NODES if key in node), None)
    if kind is None:
        raise DatasetError(f"{what} has an entry with {', '.join(map(str, node)) or 'nothing'}; expected path, join or a blend")
    if kind != "path" and node.get("aux") is not None:
        raise DatasetError(f"{what} has aux beside {kind}; write it beside the path of each data set")
    selection = _within(node.get("subset"), selection, what)
    if selection.rows is not None and kind not in ("join", "path"):
        raise DatasetError(
            f"{what} has a subset of {kind} by numbers of samples; give percentages, or the numbers of each data set"
        )
    if kind == "blend_epochized":
        for item in _items(node[kind], kind, what):
            times = Fraction(str(_positive(item, "repetitions", what)))
            for leaf in _node(item, selection, what, depth):
                if leaf.weight is not None:
                    raise DatasetError(f"{what} has a blend inside of a blend_epochized; use one kind throughout")
                yield replace(leaf, repetitions=leaf.repetitions * times)
    elif kind == "join":
        yield _joined(node, selection, what)
    elif kind == "path":
        yield from _reference(node, selection, what, depth)
    else:  # `datasets` in the first version of the format
        yield from _weighted(_items(node[kind], kind, what), selection, what, depth)


def _within(subset: Any, outer: Selection, what: str) -> Selection:
    """Return the selection of the part `subset` of which the outer selection takes a part, by Energon's arithmetic."""
    if subset is None:
        return outer
    bounds = subset.get("range") if isinstance(subset, dict) else None
    if not isinstance(bounds, list) or len(bounds) != 2 or subset.keys() != {"range"}:
        raise DatasetError(f"{what}: a subset has a range of two, such as [0%, 50%] or [100, end]; got {subset!r}")
    if outer.rows is not None:
        raise DatasetError(f"{what} takes a subset of a subset by numbers of samples; give the numbers of the data set itself")
    start, end = bounds
    if type(start) is int and (type(end) is int or end == "end") and 0 <= start <= (start if end == "end" else end):
        return replace(outer, rows=(start, None if end == "end" else end))
    shares = [_PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None for value in bounds]
    first, last = (float(share[1]) / 100.0 if share else -1.0 for share in shares)
    if not 0 <= first <= last <= 1:
        raise DatasetError(f"{what}: a subset's range is two percentages or two numbers in order, got [{start}, {end}]")
    inner, length = outer.share or (0.0, 1.0), last - first
    return replace(outer, share=(first + inner[0] * length, first + inner[1] * length) if outer.share else (first, last))


def _weighted(items: list[Mapping[str, Any]], selection: Selection, what: str, depth: int) -> Iterator[_Leaf]:
    """Yield the data sets of a weighted blend, with weights normalised to add up to 1."""
    weights = [_positive(item, "weight", what) for item in items]
    for item, weight in zip(items, weights, strict=True):
        share = weight / sum(weights)
        for leaf in _node(item, selection, what, depth):
            if leaf.repetitions != 1:
                raise DatasetError(f"{what} has a blend_epochized inside of a blend; use one kind throughout")
            yield replace(leaf, weight=share * (1.0 if leaf.weight is None else leaf.weight))


def _reference(node: Mapping[str, Any], selection: Selection, what: str, depth: int) -> Iterator[_Leaf]:
    """Yield the data set that a node's path names, or the data sets of another metadataset.

    Relative paths are relative to the file that contains them.
    """
    path = _resolved(str(node["path"]), selection)
    split = str(node.get("split_part") or selection.split)
    chosen = Selection(root=path, split=split, rows=selection.rows, share=selection.share)
    if path.endswith(SUFFIXES):
        if refused := [key for key in ("aux", *_CONFIGS) if node.get(key) is not None]:
            raise DatasetError(f"{what} has {refused[0]} for another metadataset, {path}; write it beside its data sets")
        if selection.rows is not None:
            raise DatasetError(f"{what} takes a subset of {path} by numbers of samples; give percentages")
        yield from _file(chosen, "", depth + 1)
        return
    aux = node.get("aux") or {}
    if not isinstance(aux, dict) or not all(isinstance(place, str) for place in aux.values()):
        raise DatasetError(f"{what}: aux is a mapping of names to paths, got {aux!r}")
    places = tuple(_place(place, selection) for place in aux.values())
    yield _Leaf(path=_configured(replace(chosen, aux=places), node).path())


def _joined(node: Mapping[str, Any], selection: Selection, what: str) -> _Leaf:
    """Return the data set of a join. Raises DatasetError where the join needs code."""
    if isinstance(node["join"], dict):
        raise DatasetError(f"{what} joins data sets by names, which only code takes; write them as a list")
    joiner = node.get("joiner")
    module, name = (str(joiner.get(key)) for key in ("__module__", "__class__")) if isinstance(joiner, dict) else ("", "")
    if module.split(".")[:2] != ["megatron", "energon"]:
        raise DatasetError(f"{what} has a joiner that is code and is not run; join into a class of megatron.energon")
    if refused := [key for key in _CONFIGS if node.get(key) is not None]:
        raise DatasetError(f"{what} has {refused[0]} for a whole join; write it beside the path of each data set")
    parts = []
    for item in _items(node["join"], "join", what):
        if refused := [key for key in ("subset", "aux") if item.get(key) is not None]:
            raise DatasetError(f"{what} has {refused[0]} inside of a join, where Energon overlooks it; take it out")
        path, nonmatch = item.get("path"), item.get("nonmatch", "error")
        if not isinstance(path, str) or path.endswith((*SUFFIXES, ".jsonl")) or nonmatch not in NONMATCHES:
            raise DatasetError(
                f"{what}: a join has paths of WebDatasets, each with a nonmatch of {', '.join(NONMATCHES)}; got {path!r} and "
                f"{nonmatch!r}"
            )
        split = str(item.get("split_part") or node.get("split_part") or selection.split)
        part = _configured(Selection(root=_resolved(path, selection), split=split), item)
        parts.append(Joined(selection=part, nonmatch=nonmatch))
    first, *others = parts
    joined = replace(first.selection, rows=selection.rows, share=selection.share, joined=tuple(others), joiner=name)
    return _Leaf(path=joined.path())


def _configured(selection: Selection, node: Mapping[str, Any]) -> Selection:
    """Return the selection with the configuration files that a node names."""
    return replace(
        selection,
        dataset_config=str(node.get("dataset_config") or selection.dataset_config),
        split_config=str(node.get("split_config") or selection.split_config),
    )


def _resolved(path: str, selection: Selection) -> str:
    return path if path.startswith("/") or "://" in path else _beside(selection.root, path)


def _place(text: str, selection: Selection) -> str:
    """Return the place of media that a path under aux names: Energon writes folders as filesystem://PATH or filesystem+s3://..."""
    protocol, _, path = text.partition("://")
    if protocol == "filesystem":
        return FILES + _resolved(path, selection)
    if protocol.startswith("filesystem+"):
        return f"{FILES}{protocol.removeprefix('filesystem+')}://{path}"
    return _resolved(text, selection)


def _beside(file: str, path: str) -> str:
    """Resolve a `path` that is relative to the folder of `file`, a path or a URL."""
    protocol, separator, rest = file.rpartition("://")
    return protocol + separator + posixpath.normpath(posixpath.join(posixpath.dirname(rest), path))


def _items(value: Any, key: str, what: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise DatasetError(f"{what}: {key} must be a list of data sets, each with a path")
    return value


def _positive(item: Mapping[str, Any], key: str, what: str) -> int | float:
    value = item.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise DatasetError(f"{what}: {key} must be a number above 0, got {value!r}")
    return value
