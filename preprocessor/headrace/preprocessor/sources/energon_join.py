"""Energon data sets joined by key: each sample has the fields of the samples with its key in the other data sets, too.

Shards of the first data set are the shards of the join. For one, the other data sets' shards are looked through until all of its
keys are found, those of the same name or place first: who adds a column keeps the shards. The keys of what was looked through in
vain are kept as hashes of 8 bytes, so that no shard of another data set is indexed more than twice without need.

Where several data sets have a field, the last one counts, as with Energon's own classes. Other joiners are code, and refused.
"""

from __future__ import annotations

import functools
import posixpath
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import DatasetError
from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources.base import Shard
from headrace.preprocessor.sources.blob import BlobCache, filesystem, url_of
from headrace.preprocessor.sources.energon import EnergonShard, Recipe, recipe_of, split_shards
from headrace.preprocessor.sources.energon_samples import shaped, unmapped, why_not, why_not_joined
from headrace.preprocessor.sources.energon_selection import Joined, Selection
from headrace.quarantine import Reason, Rejected

_MAX_SPREAD = 16
"""Most shards of another data set over which the samples of one shard may lie: all of them are open together with it."""
_HASHED_SHARDS = 1024


def check_join(selection: Selection) -> None:
    """Raise DatasetError if the data sets of a join cannot be joined."""
    _ = _recipes(selection)


class JoinedShard(Shard):
    """A shard of the first data set of a join."""

    is_typed = True

    def __init__(self, url: str, selection: Selection, mapping: MappingSpec, cache: BlobCache | None = None) -> None:
        first, *others = _recipes(selection)
        self._kind = selection.joiner
        self._mapping = mapping
        self._first = EnergonShard(url, first, mapping, cache)
        self.rejected = self._first.rejected
        names = split_shards(*filesystem(selection.root), _whole(selection))
        place = names.index(self._first.name) if self._first.name in names else 0
        keys = {self._first.key(row): row for row in range(self._first.num_rows)}
        self._found: list[dict[str, tuple[EnergonShard, int]]] = []
        for joined, recipe in zip(selection.joined, others, strict=True):
            found = _find(set(keys), joined, recipe, self._first.name, place, mapping, cache)
            missing = [key for key in keys if key not in found]
            if missing and joined.nonmatch == "error":
                raise DatasetError(
                    f"{joined.selection.root} has no sample {missing[0]}, with which {selection.root} is joined; add it, or say "
                    "`nonmatch: skip` or `nonmatch: none` in the metadataset"
                )
            if missing and joined.nonmatch == "skip":
                detail = f"{len(missing)} of {len(keys)} samples have no match in {joined.selection.root}, and skip it"
                self.rejected += (Rejected(name="", reason=Reason.FILTERED, detail=detail),)
                keys = {key: row for key, row in keys.items() if key in found}
            self._found.append(found)
        self._rows = list(keys.values())
        self.num_rows = len(self._rows)

    def key(self, row: int) -> str:
        """Return the key of the sample at `row`."""
        return self._first.key(self._rows[row])

    def read(self, row: int) -> Record:
        """Return the record at `row`. Raises BadSampleError where a field of any data set has no value."""
        key = self.key(row)
        fields = {**unmapped(self._first.kind), **self._first.mapped(self._rows[row])}
        loads = {"": self._first.loader(self._rows[row])}
        for number, found in enumerate(self._found):
            if key in found:
                shard, at = found[key]
                fields |= {**unmapped(shard.kind), **shard.mapped(at, f"{number}/")}  # no extension has a slash
                loads[f"{number}"] = shard.loader(at)
        present = {name: value for name, value in fields.items() if value is not None}
        return Record(key=key, fields=shaped(self._kind, present, self._mapping), load=functools.partial(_load, loads))

    def prefetch(self, rows: Sequence[int]) -> None:
        """Ask for the samples of all data sets; see `Shard.prefetch`."""
        self._first.prefetch([self._rows[row] for row in rows])
        for found in self._found:
            for shard, at in (found[key] for row in rows if (key := self.key(row)) in found):
                shard.prefetch([at])

    def close(self) -> None:
        """Close the archives."""
        self._first.close()
        for found in self._found:
            for shard in {id(shard): shard for shard, _ in found.values()}.values():
                shard.close()


def _load(loads: dict[str, Callable[[str], bytes]], name: str) -> bytes:
    number, slash, extension = name.partition("/")
    return loads[number](extension) if slash and number in loads else loads[""](name)


def _recipes(selection: Selection) -> list[Recipe]:
    """Return the recipes of the data sets of a join. Raises DatasetError where they do not fit together."""
    parts = [selection, *(joined.selection for joined in selection.joined)]
    recipes = []
    for part in parts:
        recipe = recipe_of(Selection(**{**_plain(part), "joiner": selection.joiner}))
        if recipe is None:
            raise DatasetError(f"{part.root} is no prepared Energon data set, and only such can be joined; run `energon prepare`")
        if recipe.fields is None:
            raise DatasetError(
                f"{part.root} has crude samples, which only code can join: give it a dataset.yaml with sample_type and field_map"
            )
        recipes.append(recipe)
    fields: dict[str, Any] = {}
    for recipe in recipes:
        fields |= {**unmapped(recipe.kind), **(recipe.fields or {})}
    mapped = {name for recipe in recipes for name in recipe.fields or ()}
    problem = why_not_joined(selection.joiner, fields) or why_not(selection.joiner, mapped)
    if problem:
        raise DatasetError(f"{selection.root} {problem}")
    if selection.is_part and (recipes[0].excluded or any(joined.nonmatch == "skip" for joined in selection.joined)):
        raise DatasetError(
            f"{selection.root}: a subset of a join that leaves samples out counts those that are left, which needs all of it to "
            "be joined beforehand; give the whole join, or say `nonmatch: none`"
        )
    return recipes


def _plain(selection: Selection) -> dict[str, Any]:
    """Return what a selection says of the data set itself."""
    names = ("root", "split", "dataset_config", "split_config", "rows", "share")
    return {name: getattr(selection, name) for name in names}


def _whole(selection: Selection) -> Selection:
    return Selection(**{**_plain(selection), "rows": None, "share": None})


def _find(
    keys: set[str], joined: Joined, recipe: Recipe, name: str, place: int, mapping: MappingSpec, cache: BlobCache | None
) -> dict[str, tuple[EnergonShard, int]]:
    """Return the shard and row of each of `keys` that a data set has.

    `name` and `place` are those of the shard that has the keys. Raises DatasetError where they lie in too many shards.
    """
    fs, root = filesystem(joined.selection.root)
    found: dict[str, tuple[EnergonShard, int]] = {}
    num_open = 0
    for number, url in enumerate(_likely_first(split_shards(fs, root, joined.selection), name, place)):
        if not (wanted := keys - found.keys()):
            break
        url = url_of(fs, posixpath.join(root, url))
        if number and not _may_hold(url, recipe, wanted, cache):
            continue
        shard = EnergonShard(url, recipe, mapping, cache)
        here = {key: row for row in range(shard.num_rows) if (key := shard.key(row)) in wanted}
        if not here:
            shard.close()
            continue
        found |= {key: (shard, row) for key, row in here.items()}
        num_open += 1
        if num_open > _MAX_SPREAD:
            raise DatasetError(
                f"the samples of {name} lie in more than {_MAX_SPREAD} shards of {joined.selection.root}, with which it is "
                "joined: write both data sets in the same order"
            )
    return found


def _likely_first(names: Sequence[str], name: str, place: int) -> list[str]:
    likely = name if name in names else names[min(place, len(names) - 1)]
    return [likely, *(other for other in names if other != likely)]


def _may_hold(url: str, recipe: Recipe, keys: set[str], cache: BlobCache | None) -> bool:
    wanted = np.fromiter(map(hash, keys), np.int64, len(keys))
    return bool(np.isin(wanted, _hashes(url, recipe.root, cache)).any())


@functools.lru_cache(maxsize=_HASHED_SHARDS)
def _hashes(url: str, root: str, cache: BlobCache | None) -> npt.NDArray[np.int64]:
    """Return the hashes of the keys of an archive."""
    crude = Recipe(root=root, kind="CrudeSample", fields=None, excluded=frozenset())
    with EnergonShard(url, crude, MappingSpec(), cache) as shard:
        return np.fromiter((hash(shard.key(row)) for row in range(shard.num_rows)), np.int64, shard.num_rows)
