"""Qwen2-Audio's encoder of recordings (Chu et al. 2024, section 2): Whisper's layers, then the mean of pairs, and one matrix.

`transformers` pads every recording with silence to the length of the position table. Here recordings are not padded, so that
features are equal for those of full length, and differ a little at the end of shorter ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.whisper.modeling_whisper import sinusoids

from headrace.errors import UserError
from headrace.spec import AudioSpec
from headrace.trainer.loading.collate import cumulative, places
from headrace.trainer.models.audio_encoder import STRIDE, AudioEncoder
from headrace.trainer.models.huggingface.parts import Adapted, PerDevice, Published
from headrace.trainer.models.huggingface.safetensors_reader import has_weights, read_tensor
from headrace.trainer.models.huggingface.whisper import WhisperAudio, check_recordings
from headrace.trainer.models.projector import Groups, Projector

_POOL = 2
_TABLE = "model.audio_tower.embed_positions.weight"


class QwenAudio(WhisperAudio):
    """The encoder in front of its pooling: mel (F, bins) -> features (sum of ceil(frames / 2), width).

    Its table of positions is read from the model's folder and is not trained, as in `transformers`.
    """

    def __init__(self, whole: Published, audio: AudioSpec) -> None:
        nn.Module.__init__(self)
        tower = whole.model.model.audio_tower
        check_recordings(whole.path, tower.config, audio)
        self._take(tower, PerDevice(partial(_positions, whole, tower.config)))
        self.norm = nn.Identity()
        self.adopt(tower, whole.path, whole)

    def fixed(self) -> Mapping[str, Tensor]:
        """Return the table of positions."""
        table: Tensor = self._positions.on(torch.device("cpu"))
        return {_TABLE: table}


class QwenAudioProjector(Adapted, Projector):
    """Means of pairs, the encoder's last norm and a matrix: features (L, width) -> tokens (sum of length // 2, LLM's width).

    The last feature of a recording with an odd number is left out. `Groups.rows` are here the rows of the features that are not.
    """

    def __init__(self, whole: Published) -> None:
        nn.Module.__init__(self)
        self.group = _POOL
        self.norm = whole.model.model.audio_tower.layer_norm
        self.projection = whole.model.model.multi_modal_projector.linear
        self.adopt(whole.model, whole.path, whole)

    def forward(self, features: Tensor, groups: Groups) -> Tensor:
        """Project the features of all recordings."""
        pairs = features if groups.rows is None else features[groups.rows]
        tokens: Tensor = self.projection(self.norm(pairs.view(-1, _POOL, features.shape[1]).mean(dim=1)))
        return tokens

    def token_counts(self, lengths: Tensor) -> Tensor:
        """Return the (n,) numbers of tokens that recordings of these (n,) lengths become."""
        return lengths // _POOL

    def groups(self, lengths: Tensor) -> Groups:
        """Return the features that are taken of recordings of these (n,) lengths, on the host as they are."""
        taken = self.token_counts(lengths) * _POOL
        if torch.equal(taken, lengths):
            return Groups(num_rows=int(lengths.sum()), rows=None)
        rows = places(taken) + torch.repeat_interleave(cumulative(lengths)[:-1], taken)
        return Groups(num_rows=len(rows), rows=rows)


def qwen_audio(whole: Published, audio: AudioSpec) -> tuple[AudioEncoder, Projector]:
    """Return encoder and projector. Raises UserError where the job makes other tokens of a recording than the model."""
    if audio.frames_per_token != STRIDE * _POOL or audio.last_token != "drop":
        raise UserError(
            f"the model in {whole.path} makes a token of {STRIDE * _POOL} mel frames and leaves out the rest, but the job has "
            f"audio.frames_per_token {audio.frames_per_token} and audio.last_token {audio.last_token}: set them to "
            f"{STRIDE * _POOL} and drop"
        )
    return QwenAudio(whole, audio), QwenAudioProjector(whole)


def _positions(whole: Published, config: Any) -> Tensor:
    """Return the table (positions, width): the folder's or, where it has no weights, Whisper's sinusoids."""
    folder: Path = whole.path
    if has_weights(folder):
        return read_tensor(folder, _TABLE, whole.layouts).float()
    table: Tensor = sinusoids(config.max_source_positions, config.d_model)
    return table
