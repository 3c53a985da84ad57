"""Shapes of published models for planning alone: what the papers were evaluated with, and models with window attention.

The trainer does not build them; a Hugging Face model of such a shape is trained by `model:` in a topology (docs/models.md).
"""

from __future__ import annotations

from headrace.model_shape import (
    AUDIO_SHAPES,
    GENERATOR_SHAPES,
    LLM_SHAPES,
    MODEL_SHAPES,
    VISION_SHAPES,
    ModelShape,
    TransformerShape,
)

_LLAMA3_VOCAB, _LLAMA2_VOCAB, _GPT2_VOCAB, _BERT_VOCAB, _QWEN2_VOCAB = 128_256, 32_000, 50_257, 30_522, 152_064


def _plain(layers: int, width: int, heads: int, vocab: int = 0) -> TransformerShape:
    """Return a stack as of ViT and GPT: as many heads of keys as of queries, and an MLP of four times the width, not gated."""
    return TransformerShape(layers=layers, width=width, heads=heads, kv_heads=heads, mlp=4 * width, gated=False, vocab=vocab)


def _gated(layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocab: int) -> TransformerShape:
    return TransformerShape(layers=layers, width=width, heads=heads, kv_heads=kv_heads, mlp=mlp, gated=True, vocab=vocab)


_NONE = TransformerShape(layers=0, width=1, heads=1, kv_heads=1, mlp=1, gated=False)
"""Of an encoder that a model does not have."""

# Optimus, tables 8 and 9. Its text speaks of a ViT-11B, and table 8 lists a ViT-10B in its place. Table 9 has no widths of MLPs:
# Llama 2's are those of its weights, the GPTs' four times the width, as of all published ones.
PUBLISHED_ENCODERS: dict[str, TransformerShape] = {
    "vit-3b": _plain(48, 2304, 18),
    "vit-5b": _plain(48, 3072, 24),
    "vit-10b": _plain(48, 4096, 32),
    "vit-11b": _plain(48, 4096, 32),
    "vit-22b": _plain(48, 6144, 48),
}
# Cornstarch (dissertation, table 3.1): vision is Qwen2's, audio Phi-4's, both in three sizes. Widths of MLPs are not published: 4
# widths for encoders, and about Llama 3's for the LLMs.
CORNSTARCH_VISION: dict[str, TransformerShape] = {"S": _plain(32, 1280, 20), "M": _plain(48, 2560, 40), "L": _plain(64, 3840, 60)}
CORNSTARCH_AUDIO: dict[str, TransformerShape] = {"S": _plain(24, 1024, 16), "M": _plain(32, 3072, 48), "L": _plain(48, 5120, 80)}
CORNSTARCH_LLMS: dict[str, TransformerShape] = {
    "S": _gated(16, 2048, 32, 8, 8192, _LLAMA3_VOCAB),
    "M": _gated(32, 4096, 64, 8, 14_336, _LLAMA3_VOCAB),
    "L": _gated(64, 5120, 80, 8, 25_600, _LLAMA3_VOCAB),
}
# BERT-Large to GPT-3 6.7b: what Oobleck, Varuna and Bamboo were compared on (dissertation, tables 2.1 and 2.3: 24 layers, and 32
# of GPT-3 2.7b and 6.7b); widths and heads as published with these models.
PUBLISHED_LLMS: dict[str, TransformerShape] = {
    "bert-large": _plain(24, 1024, 16, _BERT_VOCAB),
    "gpt-2-medium": _plain(24, 1024, 16, _GPT2_VOCAB),
    "gpt-3-medium": _plain(24, 1024, 16, _GPT2_VOCAB),
    "gpt-3-2.7b": _plain(32, 2560, 32, _GPT2_VOCAB),
    "gpt-3-6.7b": _plain(32, 4096, 32, _GPT2_VOCAB),
    "gpt-11b": _plain(80, 3072, 24, _GPT2_VOCAB),
    "gpt-175b": _plain(96, 12_288, 96, _GPT2_VOCAB),
    "llama-70b": _gated(80, 8192, 64, 8, 28_672, _LLAMA2_VOCAB),
    "qwen2.5-3b": _gated(36, 2048, 16, 2, 11_008, 151_936),
    "qwen2.5-14b": _gated(48, 5120, 40, 8, 13_824, _QWEN2_VOCAB),
    "disttrain-7b": _gated(32, 4096, 32, 32, 11_008, _LLAMA3_VOCAB),  # DistTrain, table 1
    "disttrain-13b": _gated(40, 5120, 40, 40, 13_824, _LLAMA3_VOCAB),
    "disttrain-70b": _gated(80, 8192, 64, 8, 28_672, _LLAMA3_VOCAB),
}


def _optimus(vision: str, llm: str) -> ModelShape:
    return ModelShape(vision=PUBLISHED_ENCODERS[vision], audio=_NONE, llm=PUBLISHED_LLMS[llm])


def _disttrain(llm: str) -> ModelShape:
    """Return a model of DistTrain, table 1; a transformer of 0.6 billion weights stands for Stable Diffusion 2.1's U-Net."""
    return ModelShape(vision=VISION_SHAPES["vit-h"], audio=_NONE, llm=PUBLISHED_LLMS[llm], generator=GENERATOR_SHAPES["dit-xl"])


def _cornstarch(sizes: str) -> ModelShape:
    """Return a model of Cornstarch, table 3.2, by its sizes of vision, audio and LLM, like SML."""
    vision, audio, llm = tuple(sizes)
    return ModelShape(vision=CORNSTARCH_VISION[vision], audio=CORNSTARCH_AUDIO[audio], llm=CORNSTARCH_LLMS[llm])


# mllm-10b, 18b and 84b: OrchMLLM, table 1, which has no numbers of heads: the LLMs' are those of Qwen2, Whisper-large's its own,
# and the others have 128 channels each, or 100 where 128 do not divide the width.
PUBLISHED_MODELS: dict[str, ModelShape] = {
    "qwen2.5-vl-3b": ModelShape(vision=VISION_SHAPES["qwen2.5-vl-vision"], audio=_NONE, llm=PUBLISHED_LLMS["qwen2.5-3b"]),
    "qwen2.5-vl-7b": ModelShape(vision=VISION_SHAPES["qwen2.5-vl-vision"], audio=_NONE, llm=LLM_SHAPES["qwen2-7b"]),
    "mllm-9b": _disttrain("disttrain-7b"),
    "mllm-15b": _disttrain("disttrain-13b"),
    "mllm-72b": _disttrain("disttrain-70b"),
    "mllm-10b": ModelShape(vision=_plain(36, 2048, 16), audio=AUDIO_SHAPES["whisper-large"], llm=LLM_SHAPES["qwen2-7b"]),
    "mllm-18b": ModelShape(vision=_plain(40, 2400, 24), audio=AUDIO_SHAPES["whisper-large"], llm=PUBLISHED_LLMS["qwen2.5-14b"]),
    "mllm-84b": ModelShape(vision=_plain(45, 3200, 32), audio=_plain(48, 3072, 24), llm=LLM_SHAPES["qwen2-72b"]),
    "optimus-small": _optimus("vit-3b", "gpt-11b"),
    "optimus-a": _optimus("vit-11b", "llama-70b"),
    "optimus-b": _optimus("vit-22b", "llama-70b"),
    "optimus-c": _optimus("vit-11b", "gpt-175b"),
    "optimus-d": _optimus("vit-22b", "gpt-175b"),
    "entrain-1b": ModelShape(vision=VISION_SHAPES["qwen2.5-vl-vision"], audio=_NONE, llm=LLM_SHAPES["llama3-1b"]),
    "entrain-3b": ModelShape(vision=VISION_SHAPES["qwen2.5-vl-vision"], audio=_NONE, llm=LLM_SHAPES["llama3-3b"]),
    **{f"cornstarch-{sizes.lower()}": _cornstarch(sizes) for sizes in ("SSS", "MMM", "LLL")},
}

PLANNED_MODELS: dict[str, ModelShape] = {**MODEL_SHAPES, **PUBLISHED_MODELS}
"""All models that steps and placements can be planned for, by name."""
