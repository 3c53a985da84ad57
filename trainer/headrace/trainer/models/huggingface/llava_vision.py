"""LLaVA's encoder of images (Liu et al. 2024, section 3): a tower without its last layers, and an MLP of two matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headrace.errors import UserError
from headrace.spec import ImageSpec
from headrace.trainer.models.huggingface.clip import ClipVision
from headrace.trainer.models.huggingface.parts import Adapted, Published
from headrace.trainer.models.huggingface.vision_tower import check_merge
from headrace.trainer.models.projector import Groups, Projector
from headrace.trainer.models.vision_encoder import VisionEncoder


class MlpProjector(Adapted, Projector):
    """An MLP of a published model: features (L, width) of `group` neighbours -> one token (L / group, LLM's width)."""

    def __init__(self, mlp: nn.Module, whole: Published, *, group: int) -> None:
        nn.Module.__init__(self)
        self.group, self.mlp = group, mlp
        self.adopt(whole.model, whole.path, whole)

    def forward(self, features: Tensor, _: Groups) -> Tensor:
        """Project the features of all images, whose groups are complete."""
        tokens: Tensor = self.mlp(features.view(-1, self.group * features.shape[1]))
        return tokens


def llava_vision(whole: Published, image: ImageSpec) -> tuple[VisionEncoder, Projector]:
    """Return tower and projector of a LLaVA. Raises UserError where it takes features otherwise than LLaVA 1.5 does."""
    config = whole.config
    check_merge(whole.path, 1, image)
    is_clip = config.vision_config.model_type == "clip_vision_model"
    if config.vision_feature_select_strategy != ("default" if is_clip else "full"):
        raise UserError(
            f"the model in {whole.path} has vision_feature_select_strategy {config.vision_feature_select_strategy!r}; "
            "its class token would become a token of the llm, or a patch would be left out, which training here does not do"
        )
    inner = whole.model.model
    num_layers = llava_layers(config)
    tower = ClipVision(whole.path, image, part=inner.vision_tower, whole=whole, num_layers=num_layers)
    return tower, MlpProjector(inner.multi_modal_projector, whole, group=1)


def llava_layers(config: Any) -> int:
    """Return the number of layers of a LLaVA's tower that make its features. Raises UserError if these are of several layers."""
    layer, all_layers = config.vision_feature_layer, config.vision_config.num_hidden_layers
    if not isinstance(layer, int) or layer in (-1, 0, all_layers):
        raise UserError(f"vision_feature_layer is {layer}; training here takes the features of one inner layer, such as -2")
    return layer if layer > 0 else all_layers + 1 + layer
