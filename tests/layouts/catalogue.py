"""All layouts, and the libraries that write them."""

from __future__ import annotations

from collections import Counter

from tests.layouts import (
    column_layouts,
    energon_blend_layouts,
    energon_layouts,
    hf_folder_layouts,
    hf_parquet_layouts,
    img2dataset_layouts,
    jsonl_layouts,
    mosaic_layouts,
    table_store_layouts,
    unclaimed_layouts,
    webdataset_layouts,
)

_FILES = (
    webdataset_layouts,
    img2dataset_layouts,
    hf_parquet_layouts,
    hf_folder_layouts,
    jsonl_layouts,
    column_layouts,
    mosaic_layouts,
    energon_layouts,
    energon_blend_layouts,
    table_store_layouts,
    unclaimed_layouts,
)
_FOUND = [layout for file in _FILES for layout in file.LAYOUTS]
WRITERS = tuple({layout.writer.module: layout.writer for layout in _FOUND}.values())
"""In the order of their first layouts."""
LAYOUTS = tuple(sorted(_FOUND, key=lambda layout: WRITERS.index(layout.writer)))

_twice = [name for name, count in Counter(layout.name for layout in LAYOUTS).items() if count > 1]
if _twice:
    raise ValueError(f"several layouts have the names {', '.join(_twice)}")
