"""Whisper's encoder (Radford et al. 2022, section 2.2) on packed recordings of any length up to its number of positions.

Its position table covers 30 seconds as published. A job that allows longer recordings is refused when the model is built, before
the first step, rather than when such a recording comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.whisper.modeling_whisper import WhisperEncoder, sinusoids

from headrace.errors import UserError
from headrace.model_shape import TransformerShape
from headrace.spec import AudioSpec
from headrace.trainer.loading.collate import cumulative, places
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.audio_encoder import STRIDE, AudioEncoder, encoder_frames
from headrace.trainer.models.huggingface.packed_layer import PackedLayer
from headrace.trainer.models.huggingface.parts import Adapted, PerDevice, prefixed, read_config, skeleton


class WhisperAudio(Adapted, AudioEncoder):
    """Whisper's encoder: mel (F, bins) -> features (sum of ceil(frames / 2), width). A frame sees its own recording only.

    Whisper itself pads every recording with silence to one length; here recordings are not padded. Positions are the sinusoids
    that Whisper was trained with, which are not trained.
    """

    layouts = prefixed("model.encoder.", "encoder.", "")

    def __init__(self, path: Path, audio: AudioSpec) -> None:
        """Raises UserError where the model cannot take the job's mel bins or the longest recording that the job allows."""
        nn.Module.__init__(self)
        config = _config(path)
        check_recordings(path, config, audio)
        model = skeleton(WhisperEncoder._from_config, config)
        self._take(model, PerDevice(sinusoids, config.max_source_positions, config.d_model))
        self.norm = model.layer_norm
        self.adopt(model, path)

    def _take(self, model: Any, positions: PerDevice) -> None:
        """Take the modules of an encoder in front of its last norm. positions: makes the table (positions, width)."""
        self.width = model.config.d_model
        self.conv1, self.conv2 = model.conv1, model.conv2
        self.layers = nn.ModuleList(PackedLayer(layer) for layer in model.layers)
        self._positions = positions

    def fixed(self) -> Mapping[str, Tensor]:
        """Return the table of positions, which Whisper stores too."""
        table: Tensor = self._positions.on(torch.device("cpu"))
        return {"embed_positions.weight": table}

    def convolutions(self, mel_frames: Tensor) -> Any:
        """Return what `embed_inputs` needs to know of recordings of these (A,) mel frames, on the host as they are.

        That is where both convolutions see them, and the place of each encoder frame in its recording.
        """
        spreads = (spread_of(conv, mel_frames) for conv in (self.conv1, self.conv2))
        return (*spreads, places(encoder_frames(mel_frames)))

    def embed_inputs(self, mel: Tensor, convolutions: Any) -> Tensor:
        """Return the input of the first layer, (sum of ceil(frames / 2), width), from mel (F, bins)."""
        first, second, place = convolutions
        dtype = self.conv1.get_parameter("weight").dtype
        x = functional.gelu(packed_conv(self.conv1, mel.to(dtype), first))
        x = functional.gelu(packed_conv(self.conv2, x, second)).to(dtype)
        table: Tensor = self._positions.on(x.device)
        return x + table[place]

    def layout(self, mel_frames: Tensor) -> Segments:
        """Return the segments of recordings of these (A,) mel frames, on the host as they are."""
        return Segments.of(cumulative(encoder_frames(mel_frames)))

    def layer_args(self, layout: Segments) -> tuple[Segments]:
        """Return what every layer takes besides its hidden states: the segments, one per recording."""
        return (layout,)


def check_recordings(path: Path, config: Any, audio: AudioSpec) -> None:
    """Raise UserError where an encoder cannot take the job's mel bins or the longest recording that the job allows."""
    if audio.mel_bins != config.num_mel_bins:
        raise UserError(
            f"the model in {path} takes {config.num_mel_bins} mel bins, but the job's audio.mel_bins is {audio.mel_bins}: "
            f"set it to {config.num_mel_bins}"
        )
    if -(-audio.most_frames // STRIDE) > config.max_source_positions:
        positions = config.max_source_positions
        seconds = positions * STRIDE * audio.hop_samples / audio.sample_rate
        raise UserError(
            f"the job's audio.max_seconds ({audio.max_seconds:g}) allows more than the {positions} positions of the model in "
            f"{path}: set it to {seconds:g}, and longer recordings are quarantined; a changed job needs a new name"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """A packed sequence of L elements spread out for a convolution: segments start at multiples of the stride, behind zeros."""

    num_rows: int
    """Length of the sequence with the zeros."""
    rows: Tensor
    """(L,) int64: the place of each element in it."""
    kept: Tensor
    """(sum of ceil(length / stride),) int64: the outputs that belong to segments."""


def spread_of(conv: nn.Module, lengths: Tensor) -> Spread:
    """Return the spread of segments of these (n,) lengths for an nn.Conv1d of width 3 and padding 1, on the host as they are."""
    assert isinstance(conv, nn.Conv1d)
    stride = conv.stride[0]
    room = (lengths // stride + 1) * stride
    starts, taken = cumulative(room)[:-1], (lengths + stride - 1) // stride
    return Spread(num_rows=int(room.sum()), rows=_ranges(starts, lengths), kept=_ranges(starts // stride, taken))


def packed_conv(conv: nn.Module, x: Tensor, spread: Spread) -> Tensor:
    """Apply an nn.Conv1d to every segment of x alone: (L, in) -> (sum of ceil(length / stride), out)."""
    sequence = x.new_zeros(spread.num_rows, x.shape[1]).index_copy(0, spread.rows, x)
    output: Tensor = conv(sequence.T[None])[0].T
    return output[spread.kept]


def audio_shape(path: Path) -> TransformerShape:
    """Return the sizes of the audio encoder at `path`. Raises UserError if the model is not a Whisper."""
    return shape_of_encoder(_config(path))


def shape_of_encoder(config: Any) -> TransformerShape:
    """Return the sizes of the encoder with this configuration of `transformers`."""
    return TransformerShape(
        layers=config.encoder_layers,
        width=config.d_model,
        heads=config.encoder_attention_heads,
        kv_heads=config.encoder_attention_heads,
        mlp=config.encoder_ffn_dim,
        gated=False,
    )


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the concatenated ranges [start, start + length) of all segments, in order."""
    return places(lengths) + torch.repeat_interleave(starts, lengths)


def _config(path: Path) -> Any:
    config = read_config(path)
    if config.model_type != "whisper":
        raise UserError(f"the model in {path} is a {config.model_type!r}, but an audio encoder is that of a 'whisper': name one")
    return config
