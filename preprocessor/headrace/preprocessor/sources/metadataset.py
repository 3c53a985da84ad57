"""Expansion of Megatron-Energon metadatasets, YAML files that blend data sets, into sources of a job.

    blend             data sets with weights: become sources with weights; the weights of nested blends are multiplied
    blend_epochized   data sets with repetitions: each becomes as many sources as it has repetitions, so that an epoch repeats
                      its samples as often; fractions are scaled to whole numbers (1 and 0.25 become 4 and 1)
    path alone        one data set

Weights and repetitions cannot be mixed, nor can a blend with weights stand beside sources without. Subflavors and shuffling
options have no meaning for a mapping and are ignored. `join`, `subset` and `aux` change what samples hold and are refused.
"""

from __future__ import annotations

import math
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from headrace.errors import DatasetError, HeadraceError
from headrace.preprocessor.sources.blob import filesystem, read_file
from headrace.preprocessor.sources.energon import MAX_YAML_BYTES, Selection, load_yaml, parse_selection, selection_of
from headrace.source_spec import SourceSpec
from headrace.spec import JobSpec, parse_spec

SUFFIXES = (".yaml", ".yml")
MAX_DEPTH = 16
MAX_COPIES = 64
_REFUSED = ("join", "subset", "aux")


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
    scale = math.lcm(*(leaf.repetitions.denominator for leaf in leaves))
    sources = []
    for source, group in groups:
        names = _Names(source)
        for leaf in group:
            copies = int(leaf.repetitions * scale)
            if copies > MAX_COPIES:
                raise DatasetError(
                    f"source {source.name!r}: {leaf.path} would be there {copies} times, more than {MAX_COPIES}; "
                    "round the repetitions, or use blend with weights"
                )
            for _ in range(copies):
                changes: dict[str, Any] = {"path": leaf.path, "name": names.of(leaf), "weight": leaf.weight}
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
    """Yield the data sets of a node of the YAML: a blend or a path. Raises DatasetError for any other node."""
    refused = [key for key in _REFUSED if node.get(key) is not None]
    if refused:
        raise DatasetError(f"{what} uses {refused[0]!r}, which is not supported; write what it selects as a data set of its own")
    if "blend_epochized" in node:
        for item in _items(node["blend_epochized"], "blend_epochized", what):
            times = Fraction(_positive(item, "repetitions", what)).limit_denominator(100)
            for leaf in _node(item, selection, what, depth):
                if leaf.weight is not None:
                    raise DatasetError(f"{what} has a blend inside of a blend_epochized; use one kind throughout")
                yield replace(leaf, repetitions=leaf.repetitions * times)
    elif "blend" in node or "datasets" in node:
        key = "blend" if "blend" in node else "datasets"  # the name in the first version of the format
        yield from _weighted(_items(node[key], key, what), selection, what, depth)
    elif isinstance(node.get("path"), str):
        yield from _reference(node, selection, depth)
    else:
        raise DatasetError(
            f"{what} has an entry with {', '.join(map(str, node)) or 'nothing'}; expected path, blend or blend_epochized"
        )


def _weighted(items: list[Mapping[str, Any]], selection: Selection, what: str, depth: int) -> Iterator[_Leaf]:
    """Yield the data sets of a weighted blend, with weights normalised to add up to 1."""
    weights = [_positive(item, "weight", what) for item in items]
    for item, weight in zip(items, weights, strict=True):
        share = weight / sum(weights)
        for leaf in _node(item, selection, what, depth):
            if leaf.repetitions != 1:
                raise DatasetError(f"{what} has a blend_epochized inside of a blend; use one kind throughout")
            yield replace(leaf, weight=share * (1.0 if leaf.weight is None else leaf.weight))


def _reference(node: Mapping[str, Any], selection: Selection, depth: int) -> Iterator[_Leaf]:
    """Yield the data set that a node's path names, or the data sets of another metadataset.

    Relative paths are relative to the file that contains them.
    """
    path = str(node["path"])
    if not path.startswith("/") and "://" not in path:
        path = _beside(selection.root, path)
    split = str(node.get("split_part") or selection.split)
    if path.endswith(SUFFIXES):
        yield from _file(Selection(root=path, split=split), "", depth + 1)
    elif path.endswith(".jsonl"):
        yield _Leaf(path=path)
    else:
        configs = {key: str(node[key]) for key in ("dataset_config", "split_config") if node.get(key)}
        yield _Leaf(path=Selection(root=path, split=split, **configs).path())


def _beside(file: str, path: str) -> str:
    """Resolve a `path` that is relative to the folder of `file`, a path or a URL."""
    protocol, separator, rest = file.rpartition("://")
    return protocol + separator + posixpath.normpath(posixpath.join(posixpath.dirname(rest), path))


def _items(value: Any, key: str, what: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise DatasetError(f"{what}: {key} must be a list of data sets, each with a path")
    return value


def _positive(item: Mapping[str, Any], key: str, what: str) -> float:
    value = item.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise DatasetError(f"{what}: {key} must be a number above 0, got {value!r}")
    return float(value)
