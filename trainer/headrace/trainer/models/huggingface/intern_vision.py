"""InternVL's vision tower and projector (Chen et al. 2024, section 3.1): a ViT, 2 x 2 features joined to one, and an MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from headrace.errors import UserError
from headrace.spec import ImageSpec
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.huggingface.clip import ClipVision, Images, class_token_rows, positions_of
from headrace.trainer.models.huggingface.llava_vision import MlpProjector
from headrace.trainer.models.huggingface.parts import Adapted, Published
from headrace.trainer.models.huggingface.vision_tower import check_merge, check_patch
from headrace.trainer.models.projector import Projector
from headrace.trainer.models.vision_encoder import VisionEncoder


class InternEntrance(nn.Module):
    """Adds class tokens and position embeddings: (P, width) -> (R, width)."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.cls_token, self.position_embeddings = embeddings.cls_token, embeddings.position_embeddings

    def forward(self, x: Tensor, images: Images) -> Tensor:
        """Turn the embedded patches x (P, width) of `images` into the rows (R, width) that the layers work on."""
        table = self.position_embeddings[0]
        return class_token_rows(x + positions_of(table[1:], images), self.cls_token[0, 0] + table[0], images)


class InternLayer(nn.Module):
    """A layer of the tower: (R, width) -> (R, width). The first one takes, and the last one returns, patches only: (P, width)."""

    def __init__(self, layer: Any, *, entrance: InternEntrance | None, is_last: bool) -> None:
        super().__init__()
        self.entrance, self.layer, self.is_last = entrance, layer, is_last

    def forward(self, x: Tensor, images: Images) -> Tensor:
        """Apply the layer to the rows of `images`, the first one after its entrance.

        The layer of `transformers` passes no mask to its attention, so that its modules are called here.
        """
        x = x if self.entrance is None else self.entrance(x, images)
        layer: Any = self.layer
        x = x + layer.lambda_1 * attend(layer, x, images.segments)
        x = x + layer.lambda_2 * layer.mlp(layer.layernorm_after(x))
        return x[images.rows] if self.is_last else x


class InternVision(ClipVision):
    """InternVL's tower: uint8 patches (P, 3 * patch * patch) -> features (P, width), in packed order, without class tokens."""

    def __init__(self, whole: Published, image: ImageSpec) -> None:
        """Raises UserError where the tower has no position embeddings, or cannot take the job's patches."""
        nn.Module.__init__(self)
        tower = whole.model.model.vision_tower
        config = tower.config
        check_patch(whole.path, config, image)
        if not config.use_absolute_position_embeddings or config.use_mask_token:
            raise UserError(
                f"the vision tower in {whole.path} has no position embeddings, or a mask token: take one of InternVL 3"
            )
        self.merge, self.width, self.extra_rows = image.merge, config.hidden_size, 1
        self.embed = tower.embeddings.patch_embeddings.projection
        entrance, last = InternEntrance(tower.embeddings), config.num_hidden_layers - 1
        self.layers = nn.ModuleList(
            InternLayer(layer, entrance=None if index else entrance, is_last=index == last)
            for index, layer in enumerate(tower.encoder.layer)
        )
        self.norm = tower.layernorm
        self._mean, self._std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
        self.adopt(tower, whole.path, whole)


def attend(layer: Any, x: Tensor, segments: Segments) -> Tensor:
    """Return what a layer's attention adds to the rows x (R, width) of these segments."""
    output: Tensor = layer.attention(layer.layernorm_before(x)[None], attention_mask=segments)[0][0]
    return output


def intern_vision(whole: Published, image: ImageSpec) -> tuple[VisionEncoder, Projector]:
    """Return tower and projector. Raises UserError where the model takes features of another layer than the last, or does not
    fit the job."""
    config = whole.config
    check_merge(whole.path, round(1 / config.downsample_ratio), image)
    if config.vision_feature_layer != -1 or config.vision_feature_select_strategy != "default":
        raise UserError(
            f"the model in {whole.path} takes features of layer {config.vision_feature_layer} "
            f"({config.vision_feature_select_strategy}), and training here those of the last one without the class token"
        )
    tower: Adapted = InternVision(whole, image)
    assert isinstance(tower, VisionEncoder)
    return tower, MlpProjector(whole.model.model.multi_modal_projector, whole, group=image.merge**2)
