"""Stand-ins for an encoder that a model does not have, and its projector: they refuse samples that need it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headrace.errors import UserError
from headrace.trainer.models.audio_encoder import AudioEncoder
from headrace.trainer.models.projector import Projector
from headrace.trainer.models.vision_encoder import VisionEncoder


class NoVision(VisionEncoder):
    """The encoder of images of a model that takes none."""

    def __init__(self, whose: str) -> None:
        """`whose`: the model, as errors call it."""
        nn.Module.__init__(self)
        self.width, self.layers, self._whose = 0, nn.ModuleList(), whose

    def layout(self, image_grids: Tensor, _: Tensor) -> Any:
        """Raise UserError: there are images, and the model takes none."""
        raise UserError(f"a sample has {len(image_grids)} images, and {self._whose} takes none: leave them out")


class NoAudio(AudioEncoder):
    """The encoder of recordings of a model that takes none."""

    def __init__(self, whose: str) -> None:
        """`whose`: the model, as errors call it."""
        nn.Module.__init__(self)
        self.width, self.layers, self._whose = 0, nn.ModuleList(), whose

    def convolutions(self, mel_frames: Tensor) -> Any:
        """Raise UserError: there are recordings, and the model takes none."""
        raise UserError(f"a sample has {len(mel_frames)} recordings, and {self._whose} takes none: leave them out")


class NoProjector(Projector):
    """The projector behind an encoder that the model does not have."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.group = 1
