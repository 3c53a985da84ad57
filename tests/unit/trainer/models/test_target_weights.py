"""Weights of answers, from the records on: every loss is the plain cross entropy of each token, times its weight."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.errors import HeadraceError, UserError
from headrace.preprocessor.decoding import Row, SampleProcessor, probe_of
from headrace.preprocessor.records.record import Record
from headrace.sample import LABEL_IGNORED, SCHEMA
from headrace.spec import JobSpec, parse_spec
from headrace.trainer.integrations.model_inputs import check_no_weights, packed_inputs, weighted_loss
from headrace.trainer.loading.collate import PackedMicrobatch, collate
from headrace.trainer.loading.packs import Padding, in_packs
from headrace.trainer.loading.slices import ORDERS, Balanced, padded_to_slices, rows_of_slices, slice_of
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.multimodal import MultimodalModel, build_model

CONVERSATIONS = [
    [("2 + 3?", "5", 0.5), ("And 2 * 3?", "6, I think.", 2.0), ("Sure?", "No.", 0)],
    [("A mill?", "By the river.", None)],
    [("Hi", "Hello", 0.125)],
]
"""Questions and answers, with the weight of each answer."""


def job(**mapping: Any) -> JobSpec:
    return parse_spec({"name": "job", "sources": [{"path": "/d", "mapping": mapping}]})


def record(turns: list[tuple[str, str, float | None]]) -> Record:
    messages: list[dict[str, Any]] = []
    for question, answer, weight in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        messages[-1] |= {} if weight is None else {"weight": weight}
    return Record(key="k", fields={"messages": messages}, load=str.encode)


@pytest.fixture(scope="module")
def processor() -> SampleProcessor:
    return SampleProcessor(job(weights=True))


@pytest.fixture(scope="module")
def rows(processor: SampleProcessor) -> list[Row]:
    return [processor.decode(record(turns), job(weights=True).sources[0]) for turns in CONVERSATIONS]


@pytest.fixture(scope="module")
def batch(processor: SampleProcessor, rows: list[Row]) -> PackedMicrobatch:
    """As it comes over the wire."""
    sink = io.BytesIO()
    part = processor.encode([4, 5, 6], rows)
    with pa.ipc.new_stream(sink, part.schema) as writer:
        writer.write_batch(part)
    return collate(list(pa.ipc.open_stream(sink.getvalue())))


@pytest.fixture(scope="module")
def model(processor: SampleProcessor) -> MultimodalModel:
    ids = processor.vocabulary.image_token, processor.vocabulary.audio_token
    return build_model("tiny", job(), processor.vocabulary.size, *ids, seed=0)


def plain(model: MultimodalModel, batch: PackedMicrobatch) -> Tensor:
    """The weighted mean of the cross entropies, token by token."""
    hidden = model.decoder(model.embed(batch), batch.position_ids, Segments.of(batch.cu_seqlens))
    losses = functional.cross_entropy(hidden @ model.decoder.output_weight.T, batch.labels, reduction="none")
    return (losses * batch.target_weights).sum() / batch.target_weights.sum()


def test_each_token_of_an_answer_and_its_end_has_the_weight_of_the_answer(
    processor: SampleProcessor, rows: list[Row], batch: PackedMicrobatch
) -> None:
    encoder = processor._template.encoder
    said: dict[float, str] = {}
    for label, weight in zip(batch.labels.tolist(), batch.target_weights.tolist(), strict=True):
        assert (label == LABEL_IGNORED) == (weight == 0)
        if label != LABEL_IGNORED:
            said[weight] = said.get(weight, "") + encoder.decode([label])
    end = "<|im_end|>"
    assert said == {0.5: f"5{end}", 2.0: f"6, I think.{end}", 1.0: f"By the river.{end}", 0.125: f"Hello{end}"}
    assert len(rows[1].target_weights) == 0, "where all weigh 1, none are sent"
    assert batch.target_weight == sum(batch.target_weights.tolist())


def test_probing_tells_the_weight_of_a_sample_before_it_is_decoded(processor: SampleProcessor, rows: list[Row]) -> None:
    source = job(weights=True).sources[0]
    probes = [probe_of("n", processor.size(processor.load(record(turns), source))) for turns in CONVERSATIONS]
    assert [probe.target_weight for probe in probes] == [float(rows[0].target_weights.sum()), None, 0.125 * probes[2].num_targets]


def test_a_cut_takes_weights_with_their_tokens() -> None:
    document = {"name": "job", "sources": [{"path": "/d", "mapping": {"weights": True}}]}
    for side in ("truncate_end", "truncate_start"):
        cut = SampleProcessor(parse_spec({**document, "text": {"max_tokens": 32, "too_long": side}}))
        row = cut.decode(record(CONVERSATIONS[0][:2]), job(weights=True).sources[0])
        assert len(row.target_weights) == len(row.labels) == 32
        assert ((row.target_weights > 0) == (row.labels != LABEL_IGNORED)).all()


def test_the_loss_of_the_compact_model_is_the_plain_one(model: MultimodalModel, batch: PackedMicrobatch) -> None:
    found = model(batch)
    weights = list(model.decoder.parameters())
    expected = torch.autograd.grad(plain(model, batch), weights)
    torch.testing.assert_close(found.loss_sum / found.target_weight, plain(model, batch))
    for gradient, want in zip(torch.autograd.grad(found.loss_sum / found.target_weight, weights), expected, strict=True):
        torch.testing.assert_close(gradient, want)


def test_padding_and_slices_take_no_part_of_it(
    model: MultimodalModel, processor: SampleProcessor, batch: PackedMicrobatch
) -> None:
    padded = in_packs(batch, [[4], [5, 6]], Padding(pack_tokens=80, segment_tokens=80, token=9))
    torch.testing.assert_close(model(padded).loss_sum, model(batch).loss_sum)
    assert padded.target_weight == batch.target_weight
    for order in ORDERS.values():
        whole = padded_to_slices(batch, 2, order, 4, 9)
        if isinstance(order, Balanced):
            whole = order.with_mask(whole, job(weights=True), processor.vocabulary)
        slices = [slice_of(whole, rows, 0) for rows in rows_of_slices(whole, 2, order)]
        assert sum(one.target_weight for one in slices) == pytest.approx(batch.target_weight)
        assert all(torch.equal(one.target_weights > 0, one.labels != LABEL_IGNORED) for one in slices)
    rows = batch.padded()
    assert torch.equal(rows.target_weights > 0, rows.labels != LABEL_IGNORED)


def test_a_model_of_hugging_face_has_the_plain_loss_of_its_logits(processor: SampleProcessor, batch: PackedMicrobatch) -> None:
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=processor.vocabulary.size, **size)).eval()
    inputs = packed_inputs(batch, processor.vocabulary, weights=True)
    labels, weights = inputs.pop("labels"), inputs.pop("target_weights")
    logits = llama(**inputs).logits
    losses = functional.cross_entropy(logits[0], batch.labels, reduction="none")
    torch.testing.assert_close(weighted_loss(logits, labels, weights), (losses * batch.target_weights).sum())


def test_what_would_leave_weights_out_is_refused(processor: SampleProcessor, batch: PackedMicrobatch) -> None:
    with pytest.raises(UserError, match="targets have weights, which the loss of a model of Hugging Face leaves out"):
        packed_inputs(batch, processor.vocabulary)
    with pytest.raises(UserError, match="source 'd' has weights of targets, which the loss of torchtitan leaves out"):
        check_no_weights(job(weights=True), "torchtitan")
    check_no_weights(job(), "torchtitan")


def test_jobs_without_weights_have_no_column_of_them(processor: SampleProcessor, rows: list[Row]) -> None:
    without = SampleProcessor(job())
    assert without.encode([1], [rows[1]]).schema.names == [
        name for name in SCHEMA.names if name not in ("image_sizes", "target_weights")
    ]
    packed = collate([without.encode([1], [rows[1]])])
    assert (len(packed.target_weights), packed.target_weight) == (0, packed.num_targets)


def test_a_sample_with_too_few_weights_is_refused(make_row: Callable[..., dict[str, Any]]) -> None:
    part = pa.RecordBatch.from_pylist([make_row(3) | {"target_weights": [1.0]}], schema=SCHEMA)
    with pytest.raises(HeadraceError, match="different numbers of labels and target_weights"):
        collate([part])
    assert replace(collate([]), num_targets=2).target_weight == 2
