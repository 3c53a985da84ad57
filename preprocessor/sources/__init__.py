"""Data sets as shards of records: WebDataset tar, Parquet and JSONL, on local disks and on any fsspec URL.

    list_shards(job spec)      every shard of every source, in an order that all services agree on
    open_shard(url, source)    one shard: an index of its rows, read at random

    listing.py     which files of a source are shards
    base.py        Shard: what the three formats have in common
    blob.py        random access to the bytes of one file, local or remote
    tar.py         a strict tar header reader
    webdataset.py  parquet.py  jsonl.py     one format each
    annotation.py  JSON bytes to fields

What these modules do not know: which field of a record is its text or its image. That is `preprocessor.mapping`.
"""

from __future__ import annotations

from headrace.errors import DatasetError
from headrace.spec import SourceSpec
from preprocessor.record import Record
from preprocessor.sources.base import Shard
from preprocessor.sources.jsonl import JsonlShard
from preprocessor.sources.listing import list_shards
from preprocessor.sources.parquet import ParquetShard
from preprocessor.sources.webdataset import WebDatasetShard

__all__ = ["Record", "Shard", "list_shards", "open_shard"]


def open_shard(url: str, source: SourceSpec) -> Shard:
    """Index the shard at `url`, a file that `list_shards` gave for `source`.

    Damage inside of the file is not an error: it is in the shard's `rejected`, and the sound rows are there.
    Raises DatasetError where the file as a whole cannot be read.
    """
    if url.endswith((".tar", ".tar.gz", ".tgz")):
        return WebDatasetShard(url)
    if url.endswith(".parquet"):
        return ParquetShard(url)
    if url.endswith(".jsonl"):
        return JsonlShard(url)
    raise DatasetError(f"source {source.name!r}: {url} is not a shard; shards end in .tar, .tar.gz, .tgz, .parquet or .jsonl")
