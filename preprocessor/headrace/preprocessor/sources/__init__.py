"""Data sets as shards of records: tars, Parquet, Arrow, JSONL, JSON, CSV, MosaicML MDS and Megatron-Energon, on any fsspec URL.

    list_shards(job spec)             every shard of every source, in an order that all services agree on
    open_shard(url, source, cache)    one shard: an index of its rows, with random access

    listing.py      which files of a source are shards: of its one format (formats.py) and its split (splits.py, hub_card.py)
    base.py         Shard: the interface that all formats implement
    blob.py         random access to the bytes of one file, local or remote
    cache.py        remote shards, and unpacked Parquet, on a local disk, shared by the preprocessors of a host
    unpacked.py     compressed shards, unpacked into temporary files of bounded size
    open_shards.py  the shards a process keeps open, within its limit on open files
    download.py     whole downloads of remote files, in spite of throttling and broken connections
    partial_blob.py  remote files that are read by ranges until much of them was read; ranges.py: requests; pieces.py: what came
    media_packs.py  remote media that rows name, kept in the cache
    tar.py          a strict tar header reader; tar_walk.py: of remote tars; sample_index.py: where the samples of a tar lie
    webdataset.py  arrow_stream.py  mds.py (mds_columns.py)  litdata.py (litdata_leaves.py)  lance_table.py     one format each
    parquet.py      Parquet, by parquet_rows.py (row groups unpacked into the cache), parquet_memory.py (decoded in memory),
                    parquet_bounds.py (what they take) and parquet_pages.py (headers of pages)
    jsonl.py  json_array.py  csv_rows.py (row_files.py)     one format each, of annotations
    named_media.py  media_files.py     media in files of their own, which rows name
    energon.py      Megatron-Energon data sets of WebDataset shards; energon_selection.py: what a source takes of one;
                    energon_samples.py: the classes of their samples; energon_join.py: data sets joined by key;
                    auxiliary.py: media in other places; metadataset.py: blends of data sets; braces.py: shard names
    annotation.py   JSON bytes to values
    filtered.py     a shard without what its source's filter does not admit, or cut to a part of its rows

These modules do not know which field of a record is its text or its image; `records.record_to_sample` does.
"""

from __future__ import annotations

from headrace.errors import DatasetError
from headrace.preprocessor.records.record import Record
from headrace.preprocessor.sources import lance_table, litdata, mds
from headrace.preprocessor.sources.arrow_stream import ArrowShard
from headrace.preprocessor.sources.auxiliary import AuxiliaryShard
from headrace.preprocessor.sources.base import Shard
from headrace.preprocessor.sources.blob import BlobCache, local_path
from headrace.preprocessor.sources.cache import default_cache
from headrace.preprocessor.sources.csv_rows import CsvShard
from headrace.preprocessor.sources.energon import EnergonShard, recipe_of
from headrace.preprocessor.sources.energon_join import JoinedShard
from headrace.preprocessor.sources.energon_selection import selection_of
from headrace.preprocessor.sources.filtered import FilteredShard, PartShard
from headrace.preprocessor.sources.formats import ENDS
from headrace.preprocessor.sources.json_array import JsonShard
from headrace.preprocessor.sources.jsonl import JsonlShard
from headrace.preprocessor.sources.lance_table import LanceShard
from headrace.preprocessor.sources.listing import is_shard, list_shards
from headrace.preprocessor.sources.litdata import LitDataShard
from headrace.preprocessor.sources.mds import MdsShard
from headrace.preprocessor.sources.named_media import TableShard
from headrace.preprocessor.sources.parquet import ParquetShard
from headrace.preprocessor.sources.unpacked import plain_name
from headrace.preprocessor.sources.webdataset import WebDatasetShard
from headrace.source_spec import SourceSpec

__all__ = ["Record", "Shard", "list_shards", "open_shard"]


def open_shard(url: str, source: SourceSpec, cache: BlobCache | None = None) -> Shard:
    """Open and index the shard at `url`, a file that `list_shards` returned for `source`: the rows that its filter admits.

    A remote shard is read through `cache`, and Parquet is unpacked into it, by default a cache in this user's directory below
    the system's temporary one. Other local shards and those at memory:// URLs are read in place.

    Damage inside the file is not an error: it is listed in the shard's `rejected`, and the sound rows can be read.
    Raises DatasetError where the file as a whole cannot be read.
    """
    shard = _open_whole(url, source, cache)
    selection = selection_of(source)
    if selection.is_part and not isinstance(shard, EnergonShard | JoinedShard):
        shard = PartShard(shard, *selection.bounds(shard.num_rows, url))
    if selection.aux and not (isinstance(shard, EnergonShard | JoinedShard) and shard.is_typed):
        shard = AuxiliaryShard(shard, selection.aux, cache)
    return FilteredShard(shard, source.filter) if source.filter.fields else shard


def _open_whole(url: str, source: SourceSpec, cache: BlobCache | None) -> Shard:
    if not is_shard(url):
        raise DatasetError(f"source {source.name!r}: {url} is not a shard; shards end in {ENDS}")
    is_read_in_place = url.startswith("memory://") or (local_path(url) is not None and not url.endswith(".parquet"))
    if not is_read_in_place:
        cache = cache or default_cache()
    if url.endswith(".parquet"):
        return TableShard(ParquetShard(url, cache), url, source, cache)
    if url.endswith((".arrow", ".feather")):
        return TableShard(ArrowShard(url, cache), url, source, cache)
    rows = plain_name(url)
    if rows.endswith((".jsonl", ".ndjson")):
        return JsonlShard(url, cache, source)
    if rows.endswith(".json"):
        return JsonShard(url, cache, source)
    if rows.endswith((".csv", ".tsv")):
        return CsvShard(url, cache, source)
    if url.endswith(mds.SUFFIXES):
        return MdsShard(url, cache)
    if lance_table.FRAGMENT.search(url):
        return TableShard(LanceShard(url), url, source)
    if litdata.CHUNK.search(url):
        return LitDataShard(url, cache)
    selection = selection_of(source)
    if selection.joiner:
        return JoinedShard(url, selection, source.mapping, cache)
    recipe = recipe_of(selection)
    return WebDatasetShard(url, cache) if recipe is None else EnergonShard(url, recipe, source.mapping, cache)
