"""Whisper's encoder (Radford et al. 2022, section 2.2) on packed log-mel frames, with rotary positions for any length."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model_shape import TransformerShape
from headrace.spec import AudioSpec
from headrace.trainer.loading.collate import cumulative
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.block import encoder_blocks
from headrace.trainer.models.rotary import Rotation, rotation

STRIDE = 2  # mel frames per encoder frame: the stride of the second convolution
_THETA = 10_000.0  # Su et al. 2021


class AudioEncoder(nn.Module):
    """Audio encoder: mel (F, bins) -> features (sum of ceil(frames / 2), width). A frame sees its own recording only."""

    def __init__(self, shape: TransformerShape, audio: AudioSpec) -> None:
        super().__init__()
        self.width = shape.width
        self.head_dim = shape.width // shape.heads
        self.conv1 = PackedConv(audio.mel_bins, shape.width)
        self.conv2 = PackedConv(shape.width, shape.width, stride=STRIDE)
        self.layers = encoder_blocks(shape)
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, mel: Tensor, mel_frames: Tensor) -> Tensor:
        """Encode all recordings. `mel_frames`: (A,) frames of each recording, on the host."""
        x = self.embed_inputs(mel, mel_frames)
        layer_args = self.layer_args(mel_frames, x.device)
        for layer in self.layers:
            x = layer(x, *layer_args)
        output: Tensor = self.norm(x)
        return output

    def embed_inputs(self, mel: Tensor, mel_frames: Tensor) -> Tensor:
        """Return the input of the first layer, (sum of ceil(frames / 2), width), from mel (F, bins)."""
        dtype = self.conv1.linear.weight.dtype
        x = functional.gelu(self.conv1(mel.to(dtype), mel_frames))
        return functional.gelu(self.conv2(x, mel_frames)).to(dtype)

    def layer_args(self, mel_frames: Tensor, device: torch.device) -> tuple[Rotation, Segments]:
        """Return what every layer takes besides its hidden states: rotary angles and segments, one per recording."""
        lengths = encoder_frames(mel_frames)
        cu_seqlens = cumulative(lengths)
        positions = torch.arange(int(cu_seqlens[-1])) - torch.repeat_interleave(cu_seqlens[:-1], lengths)
        angles = rotation(positions[:, None].to(device, non_blocking=True), self.head_dim, theta=_THETA)
        return angles, Segments.of(cu_seqlens, device)


def encoder_frames(mel_frames: Tensor) -> Tensor:
    """Return the number of encoder frames of each recording: ceil(frames / 2)."""
    return (mel_frames + STRIDE - 1) // STRIDE


class PackedConv(nn.Module):
    """A convolution of width 3 with zero padding at the ends of every segment: (L, in) -> (sum of ceil(length / stride), out).

    Equals nn.Conv1d(in, out, 3, stride, padding=1) on each segment alone, as one matrix product over all of them.
    """

    def __init__(self, channels_in: int, channels_out: int, *, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.linear = nn.Linear(3 * channels_in, channels_out)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Convolve each segment of x (L, in). `lengths`: (n,) of the segments, on the host."""
        starts = cumulative(lengths)[:-1]
        place = torch.arange(len(x)) - torch.repeat_interleave(starts, lengths)
        left = torch.repeat_interleave(lengths, lengths) - place
        has_previous = (place > 0).to(x.device, non_blocking=True)[:, None]
        has_next = (left > 1).to(x.device, non_blocking=True)[:, None]
        windows = torch.cat((x.roll(1, 0) * has_previous, x, x.roll(-1, 0) * has_next), dim=1)
        if self.stride > 1:
            windows = windows[(place % self.stride == 0).nonzero().squeeze(1).to(x.device, non_blocking=True)]
        output: Tensor = self.linear(windows)
        return output
