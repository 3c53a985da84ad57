"""An encoder of the user's with its callbacks, called with the packed images or recordings of a microbatch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.errors import UserError
from headrace.spec import ImageSpec
from headrace.trainer.loading.collate import cumulative, places
from headrace.trainer.models.audio_encoder import STRIDE, AudioEncoder
from headrace.trainer.models.projector_kinds import ProjectorKind
from headrace.trainer.models.vision_encoder import VisionEncoder, patch_positions

Inputs = dict[str, Any]
"""What a callback takes and returns, by name.

Of images: `patches` (P, 3 * patch * patch) float32 from 0 to 255, `image_grids` (I, 3), `image_cu_seqlens` (I + 1,), and on the
host `sizes`, which are the grids as tuples, `patch` and `merge`. Of recordings: `mel` (F, bins) float32, `mel_frames` (A,),
`mel_cu_seqlens` (A + 1,), and on the host `sizes`, which are the numbers of frames.
"""
_WIDTHS = ("hidden_size", "d_model", "embed_dim")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderModule:
    """An encoder of images or recordings, its projector, and the callbacks around them."""

    module: nn.Module
    """Called with those of its inputs that its `forward` names. It returns its features as packed rows (R, width), or as (media,
    rows, width), in a tensor, a tuple or an output of `transformers`. Rows of an image go from left to right and top to bottom
    where they are (media, rows, width), and in the order of the patches where they are packed. What exceeds a recording's rows is
    dropped."""
    projector: ProjectorKind | nn.Module = "mlp"
    """"linear", "mlp", "cross_attention", or a module that maps (t, group * width) to (t, the language model's width), where
    `group` neighbouring rows become a token."""
    width: int | None = None
    """Of the features; None: as the module's `config` says."""
    stride: int | None = None
    """Number of patches, or of mel frames, that the module makes one row of; None: 1 patch, or 2 frames as Whisper does."""
    preprocess_callback: Callable[[Inputs], Inputs] | None = None
    """Makes the module's inputs; None: they are `Inputs` as they come."""
    postprocess_module_callback: Callable[[Inputs, Any], Any] | None = None
    """Makes features of the inputs and the module's output, for example without a class token."""
    postprocess_projector_callback: Callable[[Tensor], Tensor] | None = None
    """Changes the tokens (t, the language model's width)."""

    def width_of(self, unit: str) -> int:
        """Return the width of the features. Raises UserError where nothing says it."""
        config = getattr(self.module, "config", None)
        found = self.width or next((getattr(config, name) for name in _WIDTHS if hasattr(config, name)), None)
        if found is None:
            raise UserError(f"the {unit} encoder, a {type(self.module).__name__}, has no config that says its width: give width=")
        return int(found)

    def stride_of(self, unit: str) -> int:
        """Return the number of positions that become one row. Raises UserError for one that cannot be."""
        least = 1 if unit == "vision" else STRIDE
        stride = least if self.stride is None else self.stride
        if stride < 1 or stride % least:
            raise UserError(f"the {unit} encoder's stride is {stride}; it must be a multiple of {least}")
        return stride


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaLayout:
    """What is known of packed media besides their payload. I: media, R: rows of features."""

    inputs: Inputs
    """Their sizes, for callbacks and the module."""
    lengths: tuple[int, ...]
    """Number of rows of each medium."""
    medium: Tensor
    """(R,) int64: the medium of each row."""
    place: Tensor
    """(R,) int64: the place of each row among those of its medium, if the module does not return packed rows."""

    @classmethod
    def of(cls, lengths: Tensor, place: Tensor | None, inputs: Inputs) -> MediaLayout:
        """place: None: in order."""
        return cls(
            inputs=inputs,
            lengths=tuple(lengths.tolist()),
            medium=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
            place=places(lengths) if place is None else place,
        )


class EncoderCall(nn.Module):
    """The module and its callbacks, as one layer: payload -> features (R, width)."""

    def __init__(self, encoder: EncoderModule, unit: str, payload: str) -> None:
        super().__init__()
        self.module = encoder.module
        self.unit, self.payload, self.width = unit, payload, encoder.width_of(unit)
        self._preprocess, self._postprocess = encoder.preprocess_callback, encoder.postprocess_module_callback
        self._names = tuple(inspect.signature(encoder.module.forward).parameters)

    def forward(self, payload: Tensor, layout: MediaLayout) -> Tensor:
        """Raises UserError where the module takes none of its inputs, or returns other features than expected."""
        inputs = {**layout.inputs, self.payload: payload}
        if self._preprocess is not None:
            inputs = self._preprocess(inputs)
        taken = {name: inputs[name] for name in self._names if name in inputs}
        if not taken:
            raise UserError(
                f"the forward of the {self.unit} encoder takes {', '.join(self._names)}, and there are {', '.join(inputs)}: "
                "give it a preprocess_callback that makes what it takes"
            )
        output = self.module(**taken)
        if self._postprocess is not None:
            output = self._postprocess(inputs, output)
        return self._rows(output, layout)

    def _rows(self, output: Any, layout: MediaLayout) -> Tensor:
        x: Tensor = output if isinstance(output, Tensor) else output[0]
        lengths, shape = layout.lengths, tuple(x.shape)
        if x.ndim == 3 and x.shape[0] == len(lengths):
            longest, same = max(lengths), self.unit == "audio" or min(lengths) == x.shape[1]
            if same and x.shape[1] >= longest:
                x = x.flatten(0, 1)[layout.medium * x.shape[1] + layout.place]
        if x.shape != (sum(lengths), self.width):
            each = f"{min(lengths)}" if min(lengths) == max(lengths) else f"{min(lengths)} to {max(lengths)}"
            raise UserError(
                f"the {self.unit} encoder returns features of the shape {shape}, but {len(lengths)} media of {each} rows make "
                f"{(sum(lengths), self.width)}: make these in postprocess_module_callback, or set stride and width"
            )
        return x


class GluedVision(VisionEncoder):
    """An encoder of images: uint8 patches (P, 3 * patch * patch) -> features (R, width)."""

    def __init__(self, encoder: EncoderModule, image: ImageSpec) -> None:
        nn.Module.__init__(self)
        self.merge, self.patch = image.merge, image.patch
        self.width, self.stride = encoder.width_of("vision"), encoder.stride_of("vision")
        self.layers = nn.ModuleList([EncoderCall(encoder, "vision", "patches")])
        self.norm: Any = nn.Identity()

    def embed_inputs(self, patches: Tensor) -> Tensor:
        """Return the pixels as the module takes them, in float32."""
        return patches.float()

    def layout(self, image_grids: Tensor, image_cu_seqlens: Tensor) -> MediaLayout:
        """Return the layout of packed images, on the host as are `image_grids` (I, 3) and the (I + 1,) offsets."""
        lengths = image_cu_seqlens.diff()
        place = None
        if self.stride == 1:
            row, column = patch_positions(image_grids, self.merge).unbind(dim=1)
            place = row * torch.repeat_interleave(image_grids[:, 2].long(), lengths) + column
        sizes = tuple(map(tuple, image_grids.tolist()))
        inputs = {"image_grids": image_grids, "image_cu_seqlens": image_cu_seqlens, "sizes": sizes}
        inputs |= {"patch": self.patch, "merge": self.merge}
        return MediaLayout.of((lengths + self.stride - 1) // self.stride, place, inputs)

    def layer_args(self, layout: MediaLayout) -> tuple[MediaLayout]:
        """Return what the only layer takes besides the pixels."""
        return (layout,)


class GluedAudio(AudioEncoder):
    """An encoder of recordings: mel (F, bins) -> features (R, width)."""

    def __init__(self, encoder: EncoderModule) -> None:
        nn.Module.__init__(self)
        self.width, self.stride = encoder.width_of("audio"), encoder.stride_of("audio")
        self.layers = nn.ModuleList([EncoderCall(encoder, "audio", "mel")])
        self.norm: Any = nn.Identity()

    def convolutions(self, _: Tensor) -> Any:
        """Return nothing: the module embeds the frames itself."""
        return ()

    def embed_inputs(self, mel: Tensor, _: Any) -> Tensor:
        """Return the frames as the module takes them, in float32."""
        return mel.float()

    def layout(self, mel_frames: Tensor) -> MediaLayout:
        """Return the layout of recordings of these (A,) mel frames, on the host as they are."""
        inputs = {"mel_frames": mel_frames, "mel_cu_seqlens": cumulative(mel_frames), "sizes": tuple(mel_frames.tolist())}
        return MediaLayout.of((mel_frames + self.stride - 1) // self.stride, None, inputs)

    def layer_args(self, layout: MediaLayout) -> tuple[MediaLayout]:
        """Return what the only layer takes besides the frames."""
        return (layout,)


def pixel_values(*, mean: tuple[float, ...] = (0.5,) * 3, std: tuple[float, ...] = (0.5,) * 3) -> Callable[[Inputs], Inputs]:
    """Return a preprocess_callback that adds `pixel_values` (I, 3, height, width), for images of one size.

    mean, std: of each channel, for values from 0 to 1, as in the model's preprocessor_config.json. The callback raises UserError
    for images of several sizes.
    """

    def callback(inputs: Inputs) -> Inputs:
        sizes, patch, merge = inputs["sizes"], inputs["patch"], inputs["merge"]
        if len(set(sizes)) > 1:
            (_, h, w), (_, other_h, other_w) = sorted(set(sizes))[:2]
            raise UserError(
                f"pixel_values takes images of one size, and there are some of {h * patch} x {w * patch} and some of "
                f"{other_h * patch} x {other_w * patch} pixels: set image.fit to square or tiles in the job"
            )
        frames, height, width = sizes[0]
        blocks = inputs["patches"].view(len(sizes) * frames, height // merge, width // merge, merge, merge, 3, patch, patch)
        pixels = blocks.permute(5, 0, 1, 3, 6, 2, 4, 7).reshape(3, -1, height * patch, width * patch)
        channels = [(values / 255 - centre) / spread for values, centre, spread in zip(pixels, mean, std, strict=True)]
        return {**inputs, "pixel_values": torch.stack(channels, dim=1)}

    return callback


def input_features(num_frames: int | None = None) -> Callable[[Inputs], Inputs]:
    """Return a preprocess_callback that adds `input_features` (A, bins, frames), in which recordings end with zeros.

    num_frames: length of all of them, 3000 for Whisper as published; None: that of the longest. The callback raises UserError for
    a longer recording.
    """

    def callback(inputs: Inputs) -> Inputs:
        sizes = inputs["sizes"]
        longest = max(sizes)
        length = longest if num_frames is None else num_frames
        if longest > length:
            raise UserError(f"a recording has {longest} mel frames, and input_features takes {length}: lower audio.max_seconds")
        rows = nn.utils.rnn.pad_sequence(inputs["mel"].split(sizes), batch_first=True)
        return {**inputs, "input_features": functional.pad(rows, (0, 0, 0, length - longest)).transpose(1, 2)}

    return callback
