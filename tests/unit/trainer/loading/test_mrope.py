"""M-RoPE's position ids: those of `transformers` for the same tokens and grids, in packs too."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError
from headrace.manifest import Vocabulary
from headrace.sample import SCHEMA, UNIT_COLUMNS
from headrace.spec import parse_spec
from headrace.trainer.loading.buffers import BufferPool
from headrace.trainer.loading.collate import PackedMicrobatch
from headrace.trainer.loading.mrope import mrope_position_ids
from headrace.trainer.loading.packs import collate_packs

TEXT, IMAGE, AUDIO, MERGE = 5, 7, 8, 2
Grid = tuple[int, int, int]
grids = st.tuples(st.just(1), st.integers(1, 5).map(lambda n: n * MERGE), st.integers(1, 5).map(lambda n: n * MERGE))
pieces = st.lists(st.one_of(st.integers(1, 6), grids), max_size=6)
"""A sample: runs of text tokens by their number, and images by their grids."""


def tokens_of(sample: list[int | Grid]) -> list[int]:
    """A sample's tokens, with one of text around each piece, as every template has it."""
    ids = [TEXT]
    for piece in sample:
        ids += [AUDIO] * piece if isinstance(piece, int) else [IMAGE] * (piece[1] * piece[2] // MERGE**2)
        ids.append(TEXT)
    return ids


def grids_of(sample: list[int | Grid]) -> list[Grid]:
    return [piece for piece in sample if not isinstance(piece, int)]


def theirs(family: str, sample: list[int | Grid]) -> list[list[int]]:
    """What `get_rope_index` of a model of `transformers` gives for one sample."""
    models = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    name = {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel", "qwen3_vl": "Qwen3VLModel"}[family]
    model = getattr(models, name)
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=4)
    owner = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    owner.get_vision_position_ids = lambda *arguments, **named: model.get_vision_position_ids(owner, *arguments, **named)
    ids = torch.tensor([tokens_of(sample)])
    images = grids_of(sample)
    positions, _ = model.get_rope_index(owner, ids, (ids == IMAGE).int(), torch.tensor(images) if images else None)
    return positions[:, 0].tolist()


def ours(samples: list[list[int | Grid]]) -> np.ndarray[Any, Any]:
    return mrope_position_ids(
        np.array([token for sample in samples for token in tokens_of(sample)]),
        np.cumsum([0, *(len(tokens_of(sample)) for sample in samples)]),
        np.array([grid for sample in samples for grid in grids_of(sample)], np.int32).reshape(-1, 3),
        image_token=IMAGE,
        merge=MERGE,
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@given(samples=st.lists(pieces, min_size=1, max_size=4))
def test_positions_are_those_of_transformers(family: str, samples: list[list[int | Grid]]) -> None:
    assert ours(samples).tolist() == np.concatenate([theirs(family, sample) for sample in samples], axis=1).tolist()


def test_what_follows_an_image_begins_behind_its_longer_side() -> None:
    (time, height, width) = ours([[(1, 4, 6), 1]]).tolist()
    assert time == [0, 1, 1, 1, 1, 1, 1, 4, 5, 6]
    assert height == [0, 1, 1, 1, 2, 2, 2, 4, 5, 6]
    assert width == [0, 1, 2, 3, 1, 2, 3, 4, 5, 6]


def test_images_side_by_side_begin_one_behind_the_other() -> None:
    """As the tiles of one picture are."""
    ids, tiles = np.array([TEXT, *[IMAGE] * 8, TEXT]), np.array([(1, 4, 4), (1, 4, 4)])
    positions = mrope_position_ids(ids, np.array([0, 10]), tiles, image_token=IMAGE, merge=MERGE)
    assert positions[1].tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_a_frame_counts_in_time() -> None:
    positions = mrope_position_ids(np.array([IMAGE] * 2), np.array([0, 2]), np.array([(2, 2, 2)]), image_token=IMAGE, merge=2)
    assert positions.tolist() == [[0, 1], [0, 0], [0, 0]]


def test_image_tokens_that_are_not_those_of_the_grids_are_refused() -> None:
    with pytest.raises(HeadraceError, match="has 3 image tokens, but its grids make 4"):
        mrope_position_ids(np.array([IMAGE] * 3), np.array([0, 3]), np.array([(1, 4, 4)]), image_token=IMAGE, merge=2)


def packed(spec: dict[str, Any], columns: tuple[str, ...] = UNIT_COLUMNS["llm"]) -> PackedMicrobatch:
    samples: list[list[int | Grid]] = [[(1, 4, 6)], [2], [(1, 2, 2), 3]]
    rows = [
        {
            "sample_id": number,
            "input_ids": tokens_of(sample),
            "labels": tokens_of(sample),
            "patches": [],
            "image_grids": [list(grid) for grid in grids_of(sample)],
            "mel": [],
            "mel_frames": [],
            "flags": 0,
        }
        for number, sample in enumerate(samples)
    ]
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA).select(list(columns))
    job = parse_spec({"name": "j", "sources": [{"path": "/x"}], "text": {"max_tokens": 16}, **spec})
    vocabulary = Vocabulary(size=100, image_token=IMAGE, audio_token=AUDIO)
    packs = [[0], [1, 2]] if job.pack_tokens else []
    return collate_packs([batch], packs, job, vocabulary, BufferPool(max_idle_bytes=0))


def test_a_job_asks_for_them() -> None:
    assert packed({}).mrope_position_ids.shape == (3, 0)
    data = packed({"mrope": True})
    bounds = data.cu_seqlens.tolist()
    assert data.mrope_position_ids.shape == (3, len(data.input_ids))
    for (start, stop), sample in zip(pairwise(bounds), [[(1, 4, 6)], [2], [(1, 2, 2), 3]], strict=True):
        assert data.mrope_position_ids[:, start:stop].tolist() == ours([sample]).tolist()
    assert data.to("meta").mrope_position_ids.device.type == "meta"


def test_padding_has_positions_from_0_and_samples_keep_theirs() -> None:
    plain = packed({"mrope": True})
    data = packed({"mrope": True, "pack_tokens": 20, "pad_to_max_length": True})
    segments, bounds, old = data.sample_segments.tolist(), data.cu_seqlens.tolist(), plain.cu_seqlens.tolist()
    for number, segment in enumerate(segments):
        kept = data.mrope_position_ids[:, bounds[segment] : bounds[segment + 1]]
        assert kept.tolist() == plain.mrope_position_ids[:, old[number] : old[number + 1]].tolist()
    padding = [pair for segment, pair in enumerate(pairwise(bounds)) if segment not in segments]
    assert padding
    for start, stop in padding:
        assert data.mrope_position_ids[:, start:stop].tolist() == [list(range(stop - start))] * 3


def test_a_unit_without_tokens_has_none() -> None:
    assert packed({"mrope": True}, ("sample_id", "image_grids")).mrope_position_ids.shape == (3, 0)
