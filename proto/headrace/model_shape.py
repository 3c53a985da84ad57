"""Sizes of models by name: the trainer builds from them, the reorder service computes costs from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A stack of transformer layers. `gated`: the MLP has a gate (SwiGLU), so three matrices instead of two."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    gated: bool

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must divide width ({self.width}), and kv_heads ({self.kv_heads}) heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A vision encoder on patches, an audio encoder on mel frames, and a Llama-style decoder."""

    vision: TransformerShape
    audio: TransformerShape
    llm: TransformerShape


def _encoder(layers: int, width: int, heads: int, mlp: int) -> TransformerShape:
    return TransformerShape(layers=layers, width=width, heads=heads, kv_heads=heads, mlp=mlp, gated=False)


def _decoder(layers: int, width: int, heads: int, kv_heads: int, mlp: int) -> TransformerShape:
    return TransformerShape(layers=layers, width=width, heads=heads, kv_heads=kv_heads, mlp=mlp, gated=True)


# tiny and small are ours, for laptops and tests. 1b: Llama-3.2-1B with SigLIP-base-sized encoders. 7b: Qwen2.5-7B with
# the Qwen2-VL vision tower (depth 32, width 1280) and Whisper-large's encoder.
MODEL_SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape(vision=_encoder(2, 64, 2, 256), audio=_encoder(2, 64, 2, 256), llm=_decoder(4, 128, 4, 2, 352)),
    "small": ModelShape(vision=_encoder(4, 256, 4, 1024), audio=_encoder(4, 256, 4, 1024), llm=_decoder(8, 512, 8, 4, 1408)),
    "1b": ModelShape(vision=_encoder(12, 768, 12, 3072), audio=_encoder(12, 768, 12, 3072), llm=_decoder(16, 2048, 32, 8, 8192)),
    "7b": ModelShape(
        vision=_encoder(32, 1280, 16, 5120), audio=_encoder(32, 1280, 20, 5120), llm=_decoder(28, 3584, 28, 4, 18944)
    ),
}
