"""The attention mask of a packed microbatch: its samples apart, and each image and recording of its own."""

from __future__ import annotations

import numpy as np

from headrace.attention_mask import AttentionMask, Ints
from headrace.errors import UserError
from headrace.mask_layouts import AUDIO, VISION, Media, Sight, mask_of_tokens
from headrace.spec import AudioSpec, ImageSpec
from headrace.trainer.loading.collate import PackedMicrobatch


def microbatch_mask(
    data: PackedMicrobatch,
    *,
    image: ImageSpec,
    audio: AudioSpec,
    image_token: int,
    audio_token: int,
    images: Sight = Sight.ITSELF,
    recordings: Sight = Sight.ITSELF,
) -> AttentionMask:
    """Return the mask of a whole microbatch whose tokens are on the host.

    image, audio: of the job, by which patches and frames become tokens. image_token, audio_token: ids of the placeholders.
    images, recordings: what their tokens see. Padding sees nothing.

    Raises UserError for a context-parallel slice, for images that are cut into tiles, and where placeholders and media differ.
    """
    if len(data.rows):
        raise UserError("an attention mask is of a whole microbatch, and this is a context-parallel slice of one: leave out cp")
    if image.fit == "anyres" and len(data.image_grids):
        raise UserError(
            "an attention mask needs the number of tokens of each image, which images with image.fit: anyres have not by their "
            "patches alone: take another fit"
        )
    of_images, of_recordings = media_lengths(data, image=image, audio=audio)
    media = [
        Media(token=image_token, modality=VISION, lengths=of_images, sight=images),
        Media(token=audio_token, modality=AUDIO, lengths=of_recordings, sight=recordings),
    ]
    try:
        return mask_of_tokens(data.input_ids.numpy(), data.cu_seqlens.numpy(), media, data.sample_segments.numpy())
    except ValueError as err:
        raise UserError(f"a microbatch has no attention mask: {err}") from err


def slice_mask(data: PackedMicrobatch) -> AttentionMask:
    """Return the mask of the whole microbatch that this is a context-parallel slice of, which comes with it.

    Raises UserError for slices of another order than `Balanced`.
    """
    if not len(data.mask_fields):
        raise UserError(
            "a context-parallel slice has its attention mask only if cp_order is balanced: give it to Parallel, or leave out cp"
        )
    return AttentionMask(fields=data.mask_fields.numpy())


def media_lengths(data: PackedMicrobatch, *, image: ImageSpec, audio: AudioSpec) -> tuple[Ints, Ints]:
    """Return the (I,) numbers of tokens of the images of a microbatch or slice, and the (A,) ones of its recordings."""
    of_images = data.image_grids.numpy().astype(np.int64).prod(axis=1) // image.merge**2
    return of_images, np.array([audio.num_tokens(count) for count in data.mel_frames.tolist()], np.int64)
