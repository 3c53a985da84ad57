"""Positions of tokens in time, height and width: M-RoPE of Qwen2-VL (arXiv:2409.12191, section 2.1), 2.5-VL and 3-VL."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.errors import HeadraceError


def mrope_position_ids(
    input_ids: NDArray[np.integer],
    cu_seqlens: NDArray[np.integer],
    image_grids: NDArray[np.integer],
    *,
    image_token: int,
    merge: int,
) -> NDArray[np.int64]:
    """Return the (3, T) positions of packed tokens in time, height and width, which begin at 0 in every segment.

    A text token, and one of a recording, has one position in all three. The tokens of an image have that of their frame, row and
    column, counted from the position behind the token before the image; what follows begins behind the longer side. This is
    `get_rope_index` of `transformers`, for images.

    input_ids: (T,). cu_seqlens: (s + 1,) offsets of the segments. image_grids: (I, 3) sizes (t, h, w) in patches, of which
    merge * merge become one token. Raises HeadraceError where the image tokens are not those of the grids.
    """
    is_image = input_ids == image_token
    frames, heights, widths = (image_grids // [1, merge, merge]).astype(np.int64).T
    counts = frames * heights * widths
    if (num_tokens := int(is_image.sum())) != int(counts.sum()):
        raise HeadraceError(
            f"the microbatch has {num_tokens} image tokens, but its grids make {int(counts.sum())}: "
            "preprocessor and trainer disagree on the patch grid or the image token"
        )
    ends = np.cumsum(counts)
    advances = np.ones(len(input_ids), np.int64)
    advances[is_image] = 0
    places = np.flatnonzero(is_image)
    advances[places[ends - 1]] = np.maximum(heights, widths)  # the last token of an image moves on what follows
    starts = np.cumsum(advances) - advances
    first, lengths = cu_seqlens[:-1][np.diff(cu_seqlens) > 0], np.diff(cu_seqlens)
    positions = np.tile(starts - np.repeat(starts[first], lengths[lengths > 0]), (3, 1))
    inside = np.arange(num_tokens) - np.repeat(ends - counts, counts)
    width, area = np.repeat(widths, counts), np.repeat(heights * widths, counts)
    positions[:, places] += np.stack((inside // area, inside % area // width, inside % width))
    return positions
