"""Models with units of `transformers`, and what they are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.dropout import ResidualDropout
from headrace.trainer.models.multimodal import MultimodalModel
from tests.verify.batches import AUDIO, AUDIO_TOKEN, IMAGE, IMAGE_TOKEN, SHAPE, VOCAB


def skeleton(units: HuggingFaceUnits, *, dropout: float = 0.0) -> MultimodalModel:
    """On the meta device; what these units do not name is compact."""
    from headrace.trainer.models.huggingface.model import adapted_model

    model = adapted_model(
        units, SHAPE, vocab_size=VOCAB, image=IMAGE, audio=AUDIO, image_token_id=IMAGE_TOKEN, audio_token_id=AUDIO_TOKEN
    )
    if dropout:
        model.decoder.dropout = ResidualDropout(model.decoder.layers, dropout, seed=0)
    return model


def whole(units: HuggingFaceUnits, *, seed: int = 0, dropout: float = 0.0) -> MultimodalModel:
    """With weights."""
    from headrace.trainer.models.huggingface.model import initialise

    model = skeleton(units, dropout=dropout)
    model.to_empty(device="cpu")
    initialise(model, seed)
    return model


def assert_gradients_match(unit: Any, original: Any) -> None:
    """Of an adapted unit, beside those of the model that its checkpoint was saved from; several may be parts of one there."""
    gradients: dict[str, list[Tensor | None]] = {}
    for name, parameter in unit.named_parameters():
        gradients.setdefault(unit.stored_names[name], []).append(parameter.grad)
    expected = dict(original.named_parameters())
    for name, parts in gradients.items():
        theirs, ours = expected[name].grad, [part for part in parts if part is not None]
        assert len(ours) == (0 if theirs is None else len(parts)), name
        if theirs is not None:
            assert_close(torch.cat(ours), theirs)


def assert_close(actual: Tensor | None, expected: Tensor | None) -> None:
    """Up to 1e-5 of the largest element, or to rounding where all are 0: a key's bias has no gradient."""
    assert actual is not None
    assert expected is not None
    torch.testing.assert_close(actual, expected, rtol=0, atol=max(1e-6, 1e-5 * float(expected.detach().abs().max())))
