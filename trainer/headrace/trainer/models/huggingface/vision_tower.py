"""Common parts of the vision towers of `transformers`: their configuration and sizes, and the embedding of packed patches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headrace.errors import UserError
from headrace.model_shape import TransformerShape
from headrace.spec import ImageSpec
from headrace.trainer.models.huggingface.parts import read_config

FAMILIES = ("qwen2_vl_vision", "qwen2_5_vl_vision", "siglip_vision_model", "clip_vision_model")
"""Supported values of a vision tower's `model_type`, be it a model itself or a part of one."""


def vision_config(path: Path) -> Any:
    """Return the configuration of the vision tower in the model at `path`. Raises UserError for an unsupported tower."""
    whole = read_config(path)
    config = getattr(whole, "vision_config", whole)
    if config.model_type not in FAMILIES:
        raise UserError(f"the vision tower in {path} is a {config.model_type!r}; it must be one of {', '.join(FAMILIES)}")
    return config


def vision_shape(path: Path) -> TransformerShape:
    """Return the sizes of the vision tower at `path`, but not its windows. Raises UserError for an unsupported tower."""
    return shape_of_tower(vision_config(path))


def shape_of_tower(config: Any) -> TransformerShape:
    """Return the sizes of the vision tower with this configuration of `transformers`, but not its windows."""
    width = encoder_width(config)
    is_qwen2 = config.model_type == "qwen2_vl_vision"
    return TransformerShape(
        layers=config.num_hidden_layers,
        width=width,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        mlp=int(width * config.mlp_ratio) if is_qwen2 else config.intermediate_size,
        gated=config.model_type == "qwen2_5_vl_vision",
    )


def encoder_width(config: Any) -> int:
    """Return the width of a vision tower's layers. Qwen2-VL calls it embed_dim, and the width of its tokens hidden_size."""
    return int(config.embed_dim if config.model_type == "qwen2_vl_vision" else config.hidden_size)


def check_patch(path: Path, config: Any, image: ImageSpec) -> None:
    """Raise UserError where the job cuts images into patches of another size than the model takes."""
    patch = patch_side(config)
    if image.patch != patch:
        raise UserError(
            f"the model in {path} takes patches of {patch} pixels, but the job's image.patch is {image.patch}: set it to {patch}"
        )


def patch_side(config: Any) -> int:
    """Return the side of a tower's patches in pixels."""
    size = config.patch_size
    return int(size if isinstance(size, int) else size[0])


def check_merge(path: Path, merge: int, image: ImageSpec) -> None:
    """Raise UserError where the model joins merge x merge patches to a token, and the job another number."""
    if image.merge != merge:
        raise UserError(
            f"the model in {path} joins {merge} x {merge} patches, but the job's image.merge is {image.merge}: set it to {merge}"
        )


def embed_patches(patches: Tensor, kernel: Tensor, bias: Tensor | None, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Embed uint8 patches (P, 3 * patch * patch) as (P, width): standardise each channel, then apply a convolution's kernel.

    kernel: (width, 3, patch, patch). mean, std: of each channel, for values from 0 to 1.
    """
    scaled = patches.view(len(patches), 3, -1).to(kernel.dtype) / 255
    centre, spread = (_of_channels(tuple(values), kernel.dtype, kernel.device) for values in (mean, std))
    return functional.linear(((scaled - centre) / spread).flatten(1), kernel.flatten(1), bias).to(kernel.dtype)


@lru_cache(maxsize=16)
def _of_channels(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one value for each channel as (3, 1), made once on each device."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None]
