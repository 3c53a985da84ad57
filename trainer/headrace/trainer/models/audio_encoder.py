"""Whisper's encoder (Radford et al. 2022, section 2.2) on packed log-mel frames, with rotary positions for any length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.model_shape import TransformerShape
from headrace.spec import AudioSpec
from headrace.trainer.loading.collate import cumulative, places
from headrace.trainer.models.attention import Segments
from headrace.trainer.models.block import encoder_blocks, layer_norm
from headrace.trainer.models.rotary import rotation

STRIDE = 2  # mel frames per encoder frame: the stride of the second convolution
_THETA = 10_000.0  # Su et al. 2021


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordingLayout:
    """Where the frames of packed recordings lie, for the layers. R: encoder frames."""

    positions: Tensor
    """(R,) int64: place of each frame in its recording."""
    segments: Segments
    """One for each recording."""


class AudioEncoder(nn.Module):
    """Audio encoder: mel (F, bins) -> features (sum of ceil(frames / 2), width). A frame sees its own recording only."""

    def __init__(self, shape: TransformerShape, audio: AudioSpec) -> None:
        super().__init__()
        self.width = shape.width
        self.head_dim = shape.width // shape.heads
        self.conv1 = PackedConv(audio.mel_bins, shape.width)
        self.conv2 = PackedConv(shape.width, shape.width, stride=STRIDE)
        self.layers = encoder_blocks(shape)
        self.norm = layer_norm(shape.width)

    def forward(self, mel: Tensor, convolutions: Any, layout: Any) -> Tensor:
        """Encode all recordings. `convolutions`, `layout`: from the methods of these names, on the device of `mel`."""
        x = self.embed_inputs(mel, convolutions)
        layer_args = self.layer_args(layout)
        for layer in self.layers:
            x = layer(x, *layer_args)
        output: Tensor = self.norm(x)
        return output

    def convolutions(self, mel_frames: Tensor) -> Any:
        """Return what `embed_inputs` needs to know of recordings of these (A,) mel frames, on the host as they are."""
        return tuple(conv.windows(mel_frames) for conv in (self.conv1, self.conv2))

    def embed_inputs(self, mel: Tensor, convolutions: Any) -> Tensor:
        """Return the input of the first layer, (sum of ceil(frames / 2), width), from mel (F, bins)."""
        first, second = convolutions
        dtype = self.conv1.linear.weight.dtype
        x = functional.gelu(self.conv1(mel.to(dtype), first))
        return functional.gelu(self.conv2(x, second)).to(dtype)

    def layout(self, mel_frames: Tensor) -> Any:
        """Return the layout of recordings of these (A,) mel frames for the layers, on the host as they are."""
        lengths = encoder_frames(mel_frames)
        return RecordingLayout(positions=places(lengths), segments=Segments.of(cumulative(lengths)))

    def layer_args(self, layout: Any) -> tuple[Any, ...]:
        """Return what every layer takes besides its hidden states, from a layout on the device: rotary angles and segments."""
        return rotation(layout.positions[:, None], self.head_dim, theta=_THETA), layout.segments


def encoder_frames(mel_frames: Tensor) -> Tensor:
    """Return the number of encoder frames of each recording: ceil(frames / 2)."""
    return (mel_frames + STRIDE - 1) // STRIDE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConvWindows:
    """What a convolution of packed segments sees of them. L: elements."""

    has_previous: Tensor
    """(L, 1) bool: whether the element before is of the same segment."""
    has_next: Tensor
    """(L, 1) bool: whether the element behind is of the same segment."""
    kept: Tensor | None
    """(sum of ceil(length / stride),) int64: the elements that the stride does not skip; None: all."""


class PackedConv(nn.Module):
    """A convolution of width 3 with zero padding at the ends of every segment: (L, in) -> (sum of ceil(length / stride), out).

    Equals nn.Conv1d(in, out, 3, stride, padding=1) on each segment alone, as one matrix product over all of them.
    """

    def __init__(self, channels_in: int, channels_out: int, *, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.linear = nn.Linear(3 * channels_in, channels_out)

    def windows(self, lengths: Tensor) -> ConvWindows:
        """Return the windows of segments of these (n,) lengths, on the host as they are."""
        place = places(lengths)
        left = torch.repeat_interleave(lengths, lengths) - place
        kept = (place % self.stride == 0).nonzero().squeeze(1) if self.stride > 1 else None
        return ConvWindows(has_previous=(place > 0)[:, None], has_next=(left > 1)[:, None], kept=kept)

    def forward(self, x: Tensor, windows: ConvWindows) -> Tensor:
        """Convolve each segment of x (L, in), with its windows on the device of x."""
        seen = torch.cat((x.roll(1, 0) * windows.has_previous, x, x.roll(-1, 0) * windows.has_next), dim=1)
        output: Tensor = self.linear(seen if windows.kept is None else seen[windows.kept])
        return output
