"""Model shapes by name, from which the trainer builds models and the reorder service computes the costs of samples."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.plan import GENERATOR, LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The dimensions of a stack of transformer layers. `gated`: the MLP has a gate (SwiGLU), so three matrices instead of two.

    Raises ValueError for heads that do not divide evenly, or window attention without both `window` and `full_every`.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    gated: bool
    window: int = 0
    """Positions per attention window in layers with window attention. 0: every layer attends to whole segments."""
    full_every: int = 1
    """With window attention, the last of every `full_every` layers attends to whole segments."""
    vocab: int = 0
    """Vocabulary size of the published model. 0: an encoder, or a model that takes the job's vocabulary."""

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must divide width ({self.width}), and kv_heads ({self.kv_heads}) heads")
        if self.window < 0 or self.full_every < 1 or (self.window > 0) != (self.full_every > 1):
            raise ValueError(
                "window attention needs both a window of at least 1 and full_every of at least 2, "
                f"got window {self.window} and full_every {self.full_every}"
            )

    @property
    def kv_width(self) -> int:
        """Channels of a position's keys, and of its values, over all KV heads."""
        return self.width * self.kv_heads // self.heads

    @property
    def layer_weights(self) -> int:
        """Number of elements in one layer's matrices: the query, key, value and output projections and the MLP."""
        return 2 * self.width * (self.width + self.kv_width) + (3 if self.gated else 2) * self.width * self.mlp


def projector_weights(width_in: int, group: int, width_out: int) -> int:
    """Return the number of a projector's matrix elements per input position, as a measure of its multiplications.

    It joins `group` positions into one token by matrices of (group * width_in)^2 and group * width_in * width_out elements.
    """
    return width_in * (group * width_in + width_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a multimodal model: a vision encoder on patches, an audio encoder on mel frames, a Llama-style decoder, and
    optionally an image generator."""

    vision: TransformerShape
    audio: TransformerShape
    llm: TransformerShape
    generator: TransformerShape | None = None

    @property
    def units(self) -> dict[str, TransformerShape]:
        """The transformer stack of every unit that a pipeline can have; the joint encoder's is that of the vision encoder, if the
        model has one, and else that of the audio encoder."""
        stacks = {
            "encoder": self.vision if self.vision.layers else self.audio,
            "vision": self.vision,
            "audio": self.audio,
            LLM: self.llm,
        }
        return stacks if self.generator is None else {**stacks, GENERATOR: self.generator}


def _encoder(layers: int, width: int, heads: int, mlp: int) -> TransformerShape:
    return TransformerShape(layers=layers, width=width, heads=heads, kv_heads=heads, mlp=mlp, gated=False)


def _decoder(layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocab: int = 0) -> TransformerShape:
    return TransformerShape(layers=layers, width=width, heads=heads, kv_heads=kv_heads, mlp=mlp, gated=True, vocab=vocab)


# Dimensions as published with the weights. Projectors, poolers and position tables are not part of a stack.
VISION_SHAPES: dict[str, TransformerShape] = {
    "clip-l": _encoder(24, 1024, 16, 4096),  # ViT-L/14 of CLIP
    "siglip-so400m": _encoder(27, 1152, 16, 4304),
    "vit-h": _encoder(32, 1280, 16, 5120),  # ViT-Huge/14
    "qwen2-vl-vision": _encoder(32, 1280, 16, 5120),
    # Layers 7, 15, 23 and 31 see the whole image, the others windows of 112 x 112 pixels: 8 x 8 patches.
    "qwen2.5-vl-vision": TransformerShape(
        layers=32, width=1280, heads=16, kv_heads=16, mlp=3420, gated=True, window=64, full_every=8
    ),
}
AUDIO_SHAPES: dict[str, TransformerShape] = {
    "whisper-small": _encoder(12, 768, 12, 3072),
    "whisper-medium": _encoder(24, 1024, 16, 4096),
    "whisper-large": _encoder(32, 1280, 20, 5120),  # v1, v2 and v3
}
LLM_SHAPES: dict[str, TransformerShape] = {
    "llama3-1b": _decoder(16, 2048, 32, 8, 8192, 128_256),  # 1b and 3b: Llama 3.2
    "llama3-3b": _decoder(28, 3072, 24, 8, 8192, 128_256),
    "llama3-8b": _decoder(32, 4096, 32, 8, 14_336, 128_256),
    "llama3-70b": _decoder(80, 8192, 64, 8, 28_672, 128_256),
    "mistral-7b": _decoder(32, 4096, 32, 8, 14_336, 32_768),  # v0.3
    "qwen2-1.5b": _decoder(28, 1536, 12, 2, 8960, 151_936),  # Qwen2.5 has the sizes of Qwen2
    "qwen2-7b": _decoder(28, 3584, 28, 4, 18_944, 152_064),
    "qwen2-72b": _decoder(80, 8192, 64, 8, 29_568, 152_064),
}
GENERATOR_SHAPES: dict[str, TransformerShape] = {
    "dit-xl": _encoder(28, 1152, 16, 4608),  # DiT-XL (Peebles and Xie 2023), without its modulation
}

# Models that the trainer can build, so without window attention. tiny, small and tiny-generator are Headrace's own, for laptops
# and tests. 1b: Llama-3.2-1B with SigLIP-base-sized encoders. 9b: DistTrain's MLLM-9B, with a transformer in place of SD 2.1's
# U-Net.
MODEL_SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape(vision=_encoder(2, 64, 2, 256), audio=_encoder(2, 64, 2, 256), llm=_decoder(4, 128, 4, 2, 352)),
    "small": ModelShape(vision=_encoder(4, 256, 4, 1024), audio=_encoder(4, 256, 4, 1024), llm=_decoder(8, 512, 8, 4, 1408)),
    "1b": ModelShape(vision=_encoder(12, 768, 12, 3072), audio=_encoder(12, 768, 12, 3072), llm=LLM_SHAPES["llama3-1b"]),
    "3b": ModelShape(vision=VISION_SHAPES["siglip-so400m"], audio=AUDIO_SHAPES["whisper-medium"], llm=LLM_SHAPES["llama3-3b"]),
    "7b": ModelShape(vision=VISION_SHAPES["qwen2-vl-vision"], audio=AUDIO_SHAPES["whisper-large"], llm=LLM_SHAPES["qwen2-7b"]),
    "8b": ModelShape(vision=VISION_SHAPES["vit-h"], audio=AUDIO_SHAPES["whisper-large"], llm=LLM_SHAPES["llama3-8b"]),
    "70b": ModelShape(vision=VISION_SHAPES["vit-h"], audio=AUDIO_SHAPES["whisper-large"], llm=LLM_SHAPES["llama3-70b"]),
    "tiny-generator": ModelShape(
        vision=_encoder(2, 64, 2, 256),
        audio=_encoder(2, 64, 2, 256),
        llm=_decoder(4, 128, 4, 2, 352),
        generator=_encoder(2, 64, 2, 256),
    ),
    "9b": ModelShape(
        vision=VISION_SHAPES["vit-h"],
        audio=AUDIO_SHAPES["whisper-large"],
        llm=LLM_SHAPES["llama3-8b"],
        generator=GENERATOR_SHAPES["dit-xl"],
    ),
}
