"""A replay judges a sample as a preprocessor does."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from headrace.cli.inspect.dissection import dissect
from headrace.preprocessor.sources import open_shard
from headrace.spec import parse_spec


def replayed(path: Path, source: dict[str, Any], **text: Any) -> dict[str, Any]:
    spec = parse_spec({"name": "j", "sources": [{"path": str(path), **source}], "text": text})
    with open_shard(str(path), spec.sources[0]) as shard:
        return dissect(spec, shard, 0, spec.sources[0])


def test_a_sample_that_the_source_leaves_out_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"caption": "short"}\n')
    report = replayed(path, {"filter": {"sizes": {"tokens": {"min": 600}}}})
    assert (report["refusal"]["reason"], report["refusal"]["piece"]) == ("filtered", "make the tokens")


def test_media_that_a_cut_has_taken_away_are_not_decoded(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)).save(picture, "JPEG")
    (tmp_path / "whole.jpg").write_bytes(picture.getvalue())
    (tmp_path / "damaged.jpg").write_bytes(picture.getvalue()[:-4000])
    texts = [{"user": "<image>What?", "assistant": "A barn."}, {"user": "<image>And this?", "assistant": "A house."}]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"texts": texts, "images": ["whole.jpg", "damaged.jpg"]}))
    assert replayed(path, {})["refusal"]["reason"] == "corrupt_media"
    report = replayed(path, {}, max_tokens=80, too_long="truncate_end")
    assert report["refusal"] is None
    assert report["tokens"]["truncated"]
    assert [medium["decoded"] is None for medium in report["media"]] == [False, True]
