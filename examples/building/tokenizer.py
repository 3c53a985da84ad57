"""The bundled tokenizer: byte-level BPE (Sennrich et al. 2016; on bytes as in GPT-2, Radford et al. 2019, section 2.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.building.samples import Sample

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)
# Qwen2's split: words with the blank before them, digits one by one, runs of punctuation, line ends.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer whose alphabet is all 256 bytes, so that decode(encode(text)) == text for every text.

    There is no normaliser: Qwen's NFC would not give back what was put in.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sample_texts(samples: Iterable[Sample]) -> Iterator[str]:
    """Every string a model would read or write, in order."""
    for sample in samples:
        fields = sample.fields()
        yield from _strings(fields.get("texts", fields.get("conversations")))


def _strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, list):
        for item in node:
            yield from _strings(item)
    elif isinstance(node, dict):
        yield from _strings([text for key, text in node.items() if key != "from"])
