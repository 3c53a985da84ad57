"""The classes of Energon's samples: which fields they have, and how these are told to a mapping."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from string import ascii_uppercase
from typing import Any

from headrace.mapping import MappingSpec
from headrace.preprocessor.records.record import schema_error
from headrace.quarantine import BadSampleError, Reason

_OF_OCR = ("block_boxes", "block_classes", "block_text", "lines_boxes", "lines_text", "words_boxes", "words_text", "chars_boxes",
    "chars_text")  # fmt: skip
_CLASSES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "CaptioningSample": (("image", "caption"), ()),
    "ImageSample": (("image",), ()),
    "ImageClassificationSample": (("image",), ("label", "label_name")),
    "InterleavedSample": (("sequence",), ()),
    "MultiChoiceVQASample": (("image", "context"), ("choices", "correct_choice_idx")),
    "OCRSample": (("image", "text"), _OF_OCR),
    "SimilarityInterleavedSample": (
        ("images", "texts"),
        ("audio", "video", "similarity_matrix", "matched_text_indices"),
    ),
    "TextSample": (("text",), ()),
    "VidQASample": (("video", "context"), ("answers", "answer_weights")),
    "VQAOCRSample": (("image", "context", "text"), ("answers", "answer_weights", "words_boxes", "words_text")),
    "VQASample": (("image", "context"), ("answers", "answer_weights")),
}
"""The fields that samples of a class must have, and those that they may have."""


def why_not(kind: str, fields: Collection[str]) -> str | None:
    """Return what is wrong with a data set whose samples are of a class and have these fields; None if it can be taken."""
    if kind in ("ImageSample", "ImageClassificationSample"):
        return f"describes samples of {kind}, which have no text to learn; describe them as CrudeWebdataset and name their text"
    if kind == "VQAOCRSample":
        return "describes samples of VQAOCRSample, which have two texts to learn; describe them as VQASample or as OCRSample"
    if kind == "SimilarityInterleavedSample" and "matched_text_indices" not in fields:
        return (
            "describes samples of SimilarityInterleavedSample without matched_text_indices, so that nothing says where their "
            "pictures are; map that field"
        )
    return None


def why_not_joined(joiner: str, fields: Collection[str]) -> str | None:
    """Return why fields of joined data sets make no sample of the class `joiner`; None if they do."""
    if joiner not in _CLASSES:
        return f"joins into {joiner or 'a class without a name'}, which is code; join into one of {', '.join(_CLASSES)}"
    required, optional = _CLASSES[joiner]
    if missing := [name for name in required if name not in fields]:
        return f"joins into {joiner}, and no data set has its field {missing[0]}; map it, or join into another class"
    if more := sorted(set(fields).difference(required, optional)):
        return f"joins into {joiner}, which has no field {more[0]}; join into another class, or map less"
    return None


def unmapped(kind: str) -> dict[str, Any]:
    """Return the fields that samples of a class have without their being mapped."""
    return dict.fromkeys(_CLASSES[kind][1]) if kind in _CLASSES else {}


def shaped(kind: str, fields: dict[str, Any], mapping: MappingSpec) -> Mapping[str, Any]:
    """Return a sample's fields in the form that the mapping expects of its class. Raises BadSampleError (schema_error)."""
    if mapping.text is not None:
        return fields
    if kind == "VQASample":
        return {**fields, "texts": [_asked(fields, _question(fields), _best(fields), mapping)]}
    if kind == "MultiChoiceVQASample":
        return {**fields, "texts": [_asked(fields, *_choice(fields), mapping)]}
    if kind == "InterleavedSample":
        return {**fields, "texts": fields.get("sequence")}
    if kind == "SimilarityInterleavedSample":
        return _matched(dict(fields))
    return fields


def _asked(fields: Mapping[str, Any], question: str, answer: Any, mapping: MappingSpec) -> dict[str, Any]:
    if "image" in fields and mapping.image_placeholder not in question:
        question = f"{mapping.image_placeholder}{question}"
    return {"user": question, "assistant": answer}


def _question(fields: Mapping[str, Any]) -> str:
    question = fields.get("context")
    if not isinstance(question, str):
        raise BadSampleError(Reason.SCHEMA_ERROR, f"context: expected a string, got {type(question).__name__}")
    return question


def _best(fields: Mapping[str, Any]) -> Any:
    """Return the answer with the largest weight, the first of equals; without usable weights the first answer."""
    answers, weights = fields.get("answers"), fields.get("answer_weights")
    if not isinstance(answers, list) or not answers:
        return answers
    if isinstance(weights, list) and len(weights) == len(answers) and all(isinstance(w, int | float) for w in weights):
        return answers[max(range(len(answers)), key=lambda index: weights[index])]
    return answers[0]


def _choice(fields: Mapping[str, Any]) -> tuple[str, str]:
    """Return a question with its choices below it, as "A. a barn", and the letter of the right one."""
    choices, right = fields.get("choices"), fields.get("correct_choice_idx", 0)
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise schema_error("choices", "a list of strings", choices)
    if len(choices) > len(ascii_uppercase):
        raise schema_error("choices", f"at most {len(ascii_uppercase)}", f"{len(choices)} of them")
    if isinstance(right, bool) or not isinstance(right, int) or not 0 <= right < len(choices):
        raise schema_error("correct_choice_idx", f"the number of one of {len(choices)} choices", repr(right))
    lines = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, choices, strict=False)]
    return "\n".join([_question(fields), *lines]), ascii_uppercase[right]


def _matched(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields as rows of MMC4 have them, in which each picture is in front of the sentence that it matches."""
    images, indices, texts = (fields.pop(name) for name in ("images", "matched_text_indices", "texts"))
    images = images if isinstance(images, list) else [images]
    if not isinstance(indices, list) or len(indices) != len(images):
        raise schema_error("matched_text_indices", f"a list of {len(images)}, one for each picture", repr(indices)[:80])
    matches = [{"image_name": image, "matched_text_index": index} for image, index in zip(images, indices, strict=True)]
    return {**fields, "text_list": texts, "image_info": matches}
