"""Whether the tokenizer in a model's folder is the one that the job's token ids come from."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.errors import UserError
from headrace.manifest import Vocabulary
from headrace.trainer.models.huggingface.safetensors_reader import has_weights

_NAME = "tokenizer.json"


def check_tokenizer(path: Path, tokenizer: str, vocabulary: Vocabulary, *, is_whole: bool) -> None:
    """Raise UserError where the tokenizer in the folder `path` has another vocabulary than the job's.

    tokenizer: the job's `text.tokenizer`. vocabulary: of the job. is_whole: whether a folder with weights must have a tokenizer,
    as what `export` makes of it could not be used otherwise.
    """
    if not path.is_dir():
        return
    named = tokenizer or "the bundled one"
    if not (path / _NAME).is_file():
        if is_whole and has_weights(path):
            raise UserError(
                f"{path} has weights but no {_NAME}, and the job's text.tokenizer is {named} with {vocabulary.size} tokens: put "
                "the model's tokenizer there, and name it in the job"
            )
        return
    size = vocabulary_size(path / _NAME)
    if size != vocabulary.size:
        raise UserError(
            f"the {_NAME} in {path} has {size} tokens, but the job's text.tokenizer, {named}, has {vocabulary.size}: name the "
            "model's in the job"
        )


def vocabulary_size(file: Path) -> int:
    """Return one more than the largest id of a tokenizer.json. Raises UserError if it is none."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        tokens = document["model"]["vocab"]
        ids = [*tokens.values()] if isinstance(tokens, dict) else [len(tokens) - 1]
        return 1 + int(max(*ids, *(token["id"] for token in document.get("added_tokens") or ())))
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise UserError(f"{file} is no tokenizer: {err}; take the model's own") from err
