"""LLaVA-OneVision's encoder of images (Li et al. 2024, arXiv:2408.03326, section 3): SigLIP on tiles, an MLP, and newlines.

Of the features of an image's tiles, the projector cuts the padding off, scales them down if they are many, and ends each row with
a learnt newline (`headrace.anyres`). Tokens of the whole image are in front of these.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.anyres import Anyres, anyres
from headrace.errors import HeadraceError, UserError
from headrace.spec import ImageSpec
from headrace.trainer.loading.collate import PackedMicrobatch, cumulative, sums
from headrace.trainer.models.huggingface.clip import ClipVision
from headrace.trainer.models.huggingface.llava_vision import MlpProjector
from headrace.trainer.models.huggingface.parts import Published
from headrace.trainer.models.huggingface.safetensors_reader import has_weights
from headrace.trainer.models.huggingface.vision_tower import check_merge
from headrace.trainer.models.projector import Projector
from headrace.trainer.models.vision_encoder import VisionEncoder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScaledTiles:
    """The features of an image's tiles that are scaled down."""

    features: Tensor
    """(rows * columns,) int64: which of the projected features they are, row by row, without padding."""
    rows: int
    columns: int
    scaled: tuple[int, int]
    """Number of rows and columns that become of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnyresTokens:
    """Where the tokens of a microbatch's images come from. P: patches, t: tokens."""

    scaled: tuple[ScaledTiles, ...]
    rows: Tensor
    """(t,) int64: the row of each token among the P projected features, the newline behind them, and the scaled features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """An image of a microbatch."""

    patches: range
    """Of the whole image, which is its first tile; those of the other tiles are behind them."""
    tiles: Anyres | None
    """None: it is not cut."""

    @property
    def tokens(self) -> int:
        return len(self.patches) + (1 if self.tiles is None else self.tiles.tokens)


class AnyresProjector(MlpProjector):
    """The MLP, and the newline: features (P, width) -> tokens (t, LLM's width)."""

    def __init__(self, whole: Published, image: ImageSpec) -> None:
        """`image`: the job's, with `fit: anyres`."""
        nn.Module.__init__(self)
        self.group, self.mlp = 1, whole.model.model.multi_modal_projector
        self.newline = whole.model.model.image_newline
        self._image = image
        self.adopt(whole.model, whole.path, whole)

    def forward(self, features: Tensor, groups: Any) -> Tensor:
        """Project the features of all images, and put the tokens together as `groups`, which are AnyresTokens, say."""
        tokens: AnyresTokens = groups
        projected: Tensor = self.mlp(features)
        made = [projected, self.newline.to(projected.dtype)[None]]
        for tiles in tokens.scaled:
            grid = projected[tiles.features].T.reshape(1, -1, tiles.rows, tiles.columns)
            made.append(functional.interpolate(grid, tiles.scaled, mode="bilinear")[0].flatten(1).T)
        return torch.cat(made)[tokens.rows]

    def image_groups(self, data: PackedMicrobatch) -> AnyresTokens:
        """Return where the tokens of a microbatch's images come from, on the host.

        Raises HeadraceError where size and tiles of an image do not fit each other.
        """
        newline = int(data.image_cu_seqlens[-1])
        behind, scaled, rows = newline + 1, [], []
        for image in self._images(data):
            rows.append(torch.arange(image.patches.start, image.patches.stop))
            if image.tiles is None:
                rows.append(torch.tensor([newline]))
                continue
            tiles, found = image.tiles, self._unpadded(image.patches.stop, image.tiles)
            size = tiles.token_rows, tiles.token_columns
            if size != (tiles.cell_rows, tiles.cell_columns) and tiles.token_rows and tiles.token_columns:
                scaled.append(
                    ScaledTiles(features=found.flatten(), rows=tiles.cell_rows, columns=tiles.cell_columns, scaled=size)
                )
                found = torch.arange(behind, behind + math.prod(size)).view(size)
                behind += math.prod(size)
            found = found[: tiles.token_rows, : tiles.token_columns]
            rows.append(functional.pad(found, (0, 1), value=newline).flatten())
        return AnyresTokens(scaled=tuple(scaled), rows=torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64))

    def image_token_counts(self, data: PackedMicrobatch) -> Tensor:
        """Return the (n,) numbers of tokens that the images of each sample become."""
        counts = torch.zeros(len(data.image_grids), dtype=torch.int32)
        starts = {start: entry for entry, start in enumerate(data.image_cu_seqlens[:-1].tolist())}
        for image in self._images(data):
            counts[starts[image.patches.start]] = image.tokens
        return sums(counts, cumulative(data.images_per_sample))

    @torch.no_grad()
    def initialise(self, unit: str, seed: int) -> None:
        """Load the weights, or draw them as `transformers` does (see `Adapted.initialise`)."""
        if not has_weights(self._path):
            generator = torch.Generator(self.newline.device).manual_seed(zlib.crc32(f"{seed}/{unit}.newline".encode()))
            nn.init.normal_(self.newline, std=1 / math.sqrt(len(self.newline)), generator=generator)
        super().initialise(unit, seed)

    def _images(self, data: PackedMicrobatch) -> list[_Image]:
        """Return the images of a microbatch. One without a known size, as where samples are made up, is not cut."""
        offsets = data.image_cu_seqlens.tolist()
        sizes = data.image_sizes.tolist() or [(1, 1)] * (len(offsets) - 1)
        firsts = [entry for entry, (height, _) in enumerate(sizes) if height]
        images = []
        for first, stop in zip(firsts, [*firsts[1:], len(sizes)], strict=True):
            height, width = sizes[first]
            tiles = anyres(width, height, self._image) if stop - first > 1 else None
            if tiles is not None and 1 + tiles.rows * tiles.columns != stop - first:
                raise HeadraceError(
                    f"an image of {width} x {height} pixels came in {stop - first - 1} tiles, and here has {tiles.rows} x "
                    f"{tiles.columns}: preprocessor and trainer disagree on the job's image.side or max_tiles_per_side"
                )
            images.append(_Image(patches=range(offsets[first], offsets[first + 1]), tiles=tiles))
        return images

    def _unpadded(self, start: int, tiles: Anyres) -> Tensor:
        """Return which features the cells of an image are, (cell rows, cell columns) int64. `start`: the first of its tiles'."""
        side = self._image.side // self._image.patch
        cells = torch.arange(start, start + tiles.rows * tiles.columns * side**2)
        cells = cells.view(tiles.rows, tiles.columns, side, side).transpose(1, 2).reshape(tiles.rows * side, -1)
        top, left = (cells.shape[0] - tiles.cell_rows) // 2, (cells.shape[1] - tiles.cell_columns) // 2
        return cells[top : top + tiles.cell_rows, left : left + tiles.cell_columns]


def onevision(whole: Published, image: ImageSpec) -> tuple[VisionEncoder, Projector]:
    """Return tower and projector of a LLaVA-OneVision.

    Raises UserError where it does not fit the job, or takes features otherwise than the published ones do.
    """
    config, path = whole.config, whole.path
    check_merge(path, 1, image)
    if config.vision_config.model_type != "siglip_vision_model" or config.vision_feature_select_strategy != "full":
        raise UserError(
            f"the model in {path} has a {config.vision_config.model_type!r} of which it takes the features "
            f"{config.vision_feature_select_strategy!r}; training here takes all of a SigLIP"
        )
    _check_images(whole, image)
    tower = ClipVision(path, image, part=whole.model.model.vision_tower, whole=whole, num_layers=onevision_layers(config))
    return tower, AnyresProjector(whole, image)


def onevision_layers(config: Any) -> int:
    """Return the number of layers of the tower that make its features. Raises UserError if these are of several layers."""
    layer, all_layers = config.vision_feature_layer, config.vision_config.num_hidden_layers
    if not isinstance(layer, int) or layer == 0:
        raise UserError(f"vision_feature_layer is {layer}; training here takes the features of one layer, such as -1")
    return layer if layer > 0 else all_layers + 1 + layer


def images_of(config: Any) -> dict[str, Any]:
    """Return what a job for a LLaVA-OneVision with this configuration says in `image`. Raises UserError where no job can."""
    side, pinpoints = config.vision_config.image_size, [list(one) for one in config.image_grid_pinpoints]
    most = math.isqrt(len(pinpoints))
    if pinpoints != [[side * rows, side * columns] for rows in range(1, most + 1) for columns in range(1, most + 1)]:
        raise UserError(
            f"image_grid_pinpoints has {len(pinpoints)} sizes; training here takes all of 1 to n by 1 to n tiles of side {side}"
        )
    scaled = str(config.vision_aspect_ratio).removeprefix("anyres_max_")
    if not scaled.isdecimal():
        raise UserError(f"vision_aspect_ratio is {config.vision_aspect_ratio!r}; training here takes anyres_max_N")
    return {"fit": "anyres", "side": side, "max_tiles_per_side": most, "anyres_max": int(scaled)}


def _check_images(whole: Published, image: ImageSpec) -> None:
    for name, expected in images_of(whole.config).items():
        if (given := getattr(image, name)) != expected:
            raise UserError(
                f"the model in {whole.path} takes image.{name} {expected}, but the job's is {given}: set it to {expected}"
            )
