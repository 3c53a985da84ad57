"""The vision towers of SigLIP (Zhai et al. 2023) and CLIP (Radford et al. 2021), with learned positions on a square grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.clip.modeling_clip import CLIPVisionModel
from transformers.models.siglip.modeling_siglip import SiglipVisionModel
from transformers.utils.constants import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from headrace.spec import ImageSpec
from headrace.trainer.loading.collate import cumulative
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.huggingface.parts import Adapted, Published, prefixed, skeleton
from headrace.trainer.models.huggingface.vision_tower import check_patch, embed_patches, vision_config
from headrace.trainer.models.vision_encoder import VisionEncoder, patch_positions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Images:
    """Layout of packed images in the layers' input. I: images, P: patches, R: rows, i.e. patches and CLIP's class tokens."""

    sizes: tuple[tuple[int, int], ...]
    """Height and width of each image in patches."""
    num_patches: list[int]
    """Number of patches of each image."""
    places: Tensor
    """(P, 2) int64: row and column of each patch in its image."""
    segments: Segments
    """Segments of the R rows, one for each image."""
    rows: Tensor
    """(P,) int64: the row of each patch among the R rows."""


class Entrance(nn.Module):
    """Adds position embeddings and, for CLIP, class tokens and its first norm: (P, width) -> (R, width)."""

    def __init__(self, embeddings: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        self.embeddings, self.norm = embeddings, norm

    def forward(self, x: Tensor, images: Images) -> Tensor:
        """Turn the embedded patches x (P, width) of `images` into the rows (R, width) that the layers work on."""
        table = self.embeddings.get_parameter("position_embedding.weight")
        if self.norm is None:
            return x + positions_of(table, images)
        class_token = self.embeddings.get_parameter("class_embedding") + table[0]
        output: Tensor = self.norm(class_token_rows(x + positions_of(table[1:], images), class_token, images))
        return output


class ClipLayer(nn.Module):
    """A layer of a tower: (R, width) -> (R, width). The first one takes, and the last one returns, patches only: (P, width)."""

    def __init__(self, layer: nn.Module, *, entrance: Entrance | None, is_last: bool) -> None:
        super().__init__()
        self.entrance, self.layer, self.is_last = entrance, layer, is_last

    def forward(self, x: Tensor, images: Images) -> Tensor:
        """Apply the layer to the rows of `images`, the first one after its entrance."""
        x = x if self.entrance is None else self.entrance(x, images)
        output: Tensor = self.layer(x[None], attention_mask=images.segments)[0]
        return output[images.rows] if self.is_last else output


class ClipVision(Adapted, VisionEncoder):
    """SigLIP's or CLIP's tower without its head: uint8 patches (P, 3 * patch * patch) -> features (P, width), in packed order.

    Images may have any size: position embeddings are interpolated, as `transformers` does on demand. CLIP's features are taken
    before the final norm, which CLIP applies to its class token only.
    """

    layouts = prefixed("", "vision_model.", "model.vision_tower.", "vision_tower.", "vision_tower.vision_model.")

    def __init__(
        self, path: Path, image: ImageSpec, *, part: Any = None, whole: Published | None = None, num_layers: int | None = None
    ) -> None:
        """`path`: of the model. `part`: the tower of the published model `whole`; None: it is built from the configuration at
        `path`. `num_layers`: how many of its layers make the features, which then are not normed; None: all.

        Raises UserError where it cannot take the job's patches.
        """
        nn.Module.__init__(self)
        config = vision_config(path)
        check_patch(path, config, image)
        is_clip = config.model_type == "clip_vision_model"
        model = part if part is not None else skeleton((CLIPVisionModel if is_clip else SiglipVisionModel)._from_config, config)
        self.merge, self.width = image.merge, config.hidden_size
        self.extra_rows = int(is_clip)
        """Rows of each image in addition to its patches: 1 for CLIP's class token, otherwise 0."""
        self.embed = model.embeddings.patch_embedding
        entrance = Entrance(model.embeddings, model.pre_layrnorm if is_clip else None)
        last = (num_layers or config.num_hidden_layers) - 1
        self.layers = nn.ModuleList(
            ClipLayer(layer, entrance=None if index else entrance, is_last=index == last)
            for index, layer in enumerate(model.encoder.layers[: last + 1])
        )
        norm: Any = nn.Identity() if is_clip or num_layers is not None else model.post_layernorm
        self.norm = norm
        self._mean = OPENAI_CLIP_MEAN if is_clip else IMAGENET_STANDARD_MEAN
        self._std = OPENAI_CLIP_STD if is_clip else IMAGENET_STANDARD_STD
        self.adopt(model, path, whole)

    def num_rows(self, image_cu_seqlens: Tensor) -> int:
        """Return the number of rows, patches and class tokens, in the hidden states between layers."""
        return int(image_cu_seqlens[-1]) + self.extra_rows * (len(image_cu_seqlens) - 1)

    def embed_inputs(self, patches: Tensor) -> Tensor:
        """Return the input of the first layer, (P, width), from uint8 patches."""
        return embed_patches(patches, self.embed.weight, self.embed.bias, self._mean, self._std)

    def layout(self, image_grids: Tensor, image_cu_seqlens: Tensor) -> Images:
        """Return the layout of packed images for the layers, on the host as are `image_grids` (I, 3) and the (I + 1,) offsets."""
        lengths = image_cu_seqlens.diff()
        number = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return Images(
            sizes=tuple((height, width) for _, height, width in image_grids.tolist()),
            num_patches=lengths.tolist(),
            places=patch_positions(image_grids, self.merge),
            segments=Segments.of(cumulative(lengths + self.extra_rows)),
            rows=torch.arange(len(number)) + (number + 1) * self.extra_rows,
        )

    def layer_args(self, layout: Images) -> tuple[Images]:
        """Return what every layer takes besides its hidden states: the layout."""
        return (layout,)


def class_token_rows(x: Tensor, class_token: Tensor, images: Images) -> Tensor:
    """Return the rows (R, width): the embedded patches x (P, width), and each image's class token (width,) in front of them."""
    return class_token.repeat(sum(images.segments.lengths), 1).index_copy(0, images.rows, x)


def positions_of(table: Tensor, images: Images) -> Tensor:
    """Return the position embeddings (P, width) of packed patches, interpolated from the `table` (side * side, width)."""
    side = math.isqrt(len(table))
    square = table.T.reshape(1, -1, side, side)
    found = []
    for (height, width), inside in zip(images.sizes, torch.split(images.places, images.num_patches), strict=True):
        resized = square
        if (height, width) != (side, side):
            resized = functional.interpolate(square, (height, width), mode="bicubic", align_corners=False)
        found.append(resized[0, :, inside[:, 0], inside[:, 1]].T)
    return torch.cat(found)
