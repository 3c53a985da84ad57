"""Masks of the sequences that models are trained on, beside the published pictures of them."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.mask_layouts import AUDIO, TEXT, VISION, Media, Sight, causal_blockwise, mask_of_tokens, packed, shared_question


def matrix(mask):
    everywhere = np.arange(mask.num_tokens)
    return mask.visible(everywhere, everywhere).astype(int)


def test_text_sees_all_before_it_and_media_see_themselves():
    """Cornstarch, figure 3.4: tokens of an encoder attend to those of the encoder only, text to all that came before."""
    np.testing.assert_array_equal(
        matrix(packed([[(TEXT, 2), (VISION, 2), (TEXT, 1), (AUDIO, 2), (TEXT, 1)]])),
        [
            [1, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0, 0, 0],
            [1, 1, 1, 1, 1, 0, 0, 0],
            [0, 0, 0, 0, 0, 1, 1, 0],
            [0, 0, 0, 0, 0, 1, 1, 0],
            [1, 1, 1, 1, 1, 1, 1, 1],
        ],
    )


def test_samples_of_a_pack_and_images_of_a_sample_are_apart():
    np.testing.assert_array_equal(
        matrix(packed([[(VISION, 1), (VISION, 1), (TEXT, 1)], [(TEXT, 2)]], padding=1)),
        [
            [1, 0, 0, 0, 0, 0],
            [0, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [0, 0, 0, 1, 0, 0],
            [0, 0, 0, 1, 1, 0],
            [0, 0, 0, 0, 0, 0],
        ],
    )


def test_an_image_may_see_what_came_before_it():
    np.testing.assert_array_equal(
        matrix(packed([[(TEXT, 1), (VISION, 2), (VISION, 1), (TEXT, 1)]], sight=Sight.BEFORE)),
        [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    )


def test_answers_share_their_question():
    np.testing.assert_array_equal(matrix(shared_question(1, [2, 1])), [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]])


def test_the_last_block_sees_every_block():
    np.testing.assert_array_equal(
        matrix(causal_blockwise(1, [1, 1], 2)),
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    )


IMAGE, SOUND = 8, 9
IDS = np.array([1, IMAGE, IMAGE, 2, IMAGE, 3, SOUND, SOUND, 4, 5, 0, 0])
OFFSETS = np.array([0, 6, 10, 12])


def images(lengths=(2, 1), **fields):
    return Media(token=IMAGE, modality=VISION, lengths=np.array(lengths), **fields)


def test_a_packed_microbatch_has_the_mask_of_its_samples():
    sound = Media(token=SOUND, modality=AUDIO, lengths=np.array([2, 0]))
    mask = mask_of_tokens(IDS, OFFSETS, [images(), sound], sample_segments=np.array([0, 1]))
    same = packed([[(TEXT, 1), (VISION, 2), (TEXT, 1), (VISION, 1), (TEXT, 1)], [(AUDIO, 2), (TEXT, 2)]], padding=2)
    np.testing.assert_array_equal(matrix(mask), matrix(same))


def test_media_next_to_each_other_are_told_apart_by_their_lengths():
    mask = mask_of_tokens(np.full(3, IMAGE), np.array([0, 3]), [images()])
    np.testing.assert_array_equal(matrix(mask), [[1, 1, 0], [1, 1, 0], [0, 0, 1]])


def test_a_model_with_one_causal_mask_has_it():
    mask = mask_of_tokens(IDS, OFFSETS[[0, 3]], [images(sight=Sight.TEXT)])
    np.testing.assert_array_equal(matrix(mask), np.tri(12, dtype=int))


def test_placeholders_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 tokens have the id 8, but what they stand for has 4 tokens in 2 media"):
        mask_of_tokens(IDS, OFFSETS, [images((2, 2))])
    with pytest.raises(ValueError, match="medium 1 of the token 8 lies in two segments"):
        mask_of_tokens(np.full(3, IMAGE), np.array([0, 2, 3]), [images((1, 2))])
    with pytest.raises(ValueError, match="must rise from 0 to the number of tokens, 12"):
        mask_of_tokens(IDS, OFFSETS[:-1])
