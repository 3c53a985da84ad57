"""Forms of a microbatch for models of others: padded rows, labels that are not shifted, arguments of flash attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.sample import LABEL_IGNORED
from headrace.trainer.loading.collate import collate
from headrace.trainer.loading.packs import Padding, in_packs
from tests.unit.trainer.loading.test_packs import collated, tokens_of

lengths = st.lists(st.integers(1, 12), max_size=6).map(lambda drawn: dict(enumerate(drawn)))


@given(lengths, st.integers(1, 5), st.booleans())
def test_a_row_is_a_sample_and_then_padding(drawn: dict[int, int], multiple: int, in_padded_packs: bool) -> None:
    data = collated(drawn)
    if in_padded_packs:
        data = in_packs(data, [[sample] for sample in drawn], Padding(pack_tokens=13, segment_tokens=5, token=0))
    rows = data.padded(multiple)
    assert rows.input_ids.shape[1] % multiple == 0
    assert rows.input_ids.shape[1] - max(drawn.values(), default=0) < multiple
    for row, tokens in enumerate(tokens_of(data).values()):
        rest = [0] * (rows.input_ids.shape[1] - len(tokens))
        assert rows.input_ids[row].tolist() == tokens + rest
        assert rows.attention_mask[row].tolist() == [1] * len(tokens) + rest
        assert rows.position_ids[row].tolist() == list(range(len(tokens))) + rest
        assert rows.labels[row].tolist() == [*tokens[1:], *[LABEL_IGNORED] * (len(rest) + 1)]
        assert rows.unshifted_labels[row].tolist() == [LABEL_IGNORED, *tokens[1:], *[LABEL_IGNORED] * len(rest)]


@given(lengths)
def test_a_model_that_shifts_labels_itself_meets_the_same_targets(drawn: dict[int, int]) -> None:
    data = collated(drawn)
    unshifted = data.unshifted_labels
    again = torch.cat((unshifted[1:], torch.tensor([LABEL_IGNORED])))[: len(unshifted)]
    assert torch.equal(again, data.labels)
    assert all(label in (token, LABEL_IGNORED) for label, token in zip(unshifted.tolist(), data.input_ids.tolist(), strict=True))


def test_positions_of_m_rope_are_padded_too() -> None:
    data = collated({0: 2, 1: 3})
    data = replace(data, mrope_position_ids=torch.arange(15).view(3, 5))
    assert data.padded().mrope_position_ids.tolist() == [
        [[5 * k, 5 * k + 1, 0], [5 * k + 2, 5 * k + 3, 5 * k + 4]] for k in range(3)
    ]


def test_flash_attention_gets_offsets_and_the_longest_segment() -> None:
    arguments = collated({0: 2, 1: 5, 2: 1}).flash_kwargs()
    assert arguments["cu_seqlens_q"] is arguments["cu_seqlens_k"]
    assert arguments["cu_seqlens_q"].tolist() == [0, 2, 7, 8]
    assert arguments["cu_seqlens_q"].dtype == torch.int32
    assert (arguments["max_seqlen_q"], arguments["max_seqlen_k"]) == (5, 5)


def test_a_microbatch_without_samples_has_these_forms_too() -> None:
    empty = collate([])
    assert empty.padded(8).input_ids.shape == (0, 0)
    assert empty.unshifted_labels.shape == (0,)
    assert empty.flash_kwargs()["max_seqlen_q"] == 0
