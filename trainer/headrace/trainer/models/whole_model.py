"""The whole model of a job, from which each process builds its part: its sizes, its modules and its initial weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.errors import UserError
from headrace.manifest import Vocabulary
from headrace.model_shape import MODEL_SHAPES, ModelShape
from headrace.spec import JobSpec
from headrace.trainer.models.adapted_units import HuggingFaceUnits
from headrace.trainer.models.dropout import ResidualDropout
from headrace.trainer.models.multimodal import MultimodalModel, build_model, initialise


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """A model that no process holds as a whole."""

    name: str
    """Named size of its compact units."""
    shape: ModelShape
    make: Callable[[], MultimodalModel]
    """Builds it on the meta device."""
    initialise: Callable[[MultimodalModel, int], None]
    """Gives the modules of a stage their initial weights for a seed."""
    pretrained: Sequence[Path | str] = ()
    """Folders of pretrained weights that training starts from, or what else has them, in words."""

    @classmethod
    def of(cls, name: str, spec: JobSpec, vocabulary: Vocabulary, units: HuggingFaceUnits, *, dropout: float = 0.0) -> WholeModel:
        """Return the model of a job's trainers: of a named size, with these units from `transformers`.

        dropout: rate in the LLM's layers (`models.dropout`).

        Raises UserError where a unit does not fit the job, or `transformers` is missing.
        """
        ids = vocabulary.image_token, vocabulary.audio_token
        if units == HuggingFaceUnits():
            make = partial(build_model, name, spec, vocabulary.size, *ids, seed=spec.seed, device="meta")
            make = partial(_with_dropout, make, dropout, spec.seed) if dropout else make
            return cls(name=name, shape=MODEL_SHAPES[name], make=make, initialise=initialise)
        need_transformers()
        from headrace.trainer.models.huggingface import model as adapted
        from headrace.trainer.models.huggingface.llm import check_positions
        from headrace.trainer.models.huggingface.tokenizer_check import check_tokenizer

        if units.whole is not None:
            check_positions(units.whole, spec)
        for path in (units.whole, units.llm):
            if path is not None:
                check_tokenizer(path, spec.text.tokenizer, vocabulary, is_whole=path is units.whole)
        make = partial(
            adapted.adapted_model,
            units,
            MODEL_SHAPES[name],
            vocab_size=vocabulary.size,
            image=spec.image,
            audio=spec.audio,
            image_token_id=vocabulary.image_token,
            audio_token_id=vocabulary.audio_token,
            seed=spec.seed,
        )
        make = partial(_with_dropout, make, dropout, spec.seed) if dropout else make
        return cls(
            name=name,
            shape=adapted.adapted_shape(units, MODEL_SHAPES[name]),
            make=make,
            initialise=adapted.initialise,
            pretrained=adapted.pretrained(units),
        )


def _with_dropout(make: Callable[[], MultimodalModel], rate: float, seed: int) -> MultimodalModel:
    model = make()
    model.decoder.dropout = ResidualDropout(model.decoder.layers, rate, seed)
    return model


def need_transformers() -> None:
    """Raise UserError where `transformers` is missing."""
    try:
        from headrace.trainer.models.huggingface import model  # noqa: F401
    except ImportError as err:
        raise UserError(f"the topology's model needs transformers, which is not here ({err}): pip install transformers") from err
